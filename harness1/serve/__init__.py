"""Servers: an index over HTTP for other processes, other machines and other trainers."""
