"""Verifiers, which judge claims against documents."""
