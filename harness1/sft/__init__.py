"""Supervised fine-tuning: teachers' episodes are collected, and training rows are made of them."""
