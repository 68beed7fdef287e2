"""Inference engines that take token ids, over HTTP or in subprocesses."""
