"""``python -m ddtree_lab``: the command line."""

from ddtree_lab.cli import main

raise SystemExit(main())
