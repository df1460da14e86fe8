"""Traces: runs on disk, and rounds replayed without a model."""

from ddtree_lab.trace.replay import prune, replay, replay_round
from ddtree_lab.trace.store import load_trace, save_trace

__all__ = ["load_trace", "prune", "replay", "replay_round", "save_trace"]
