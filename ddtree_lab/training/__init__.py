"""Drafter training: a target in, a DFlash drafter for it out. ``train.py`` is the run, each other module one part."""
