"""Readers and writers of the layouts that several datasets share."""
