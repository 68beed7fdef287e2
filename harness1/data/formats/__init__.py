"""Readers and writers of layouts that several datasets share."""
