"""What a frozen model answers from what was delivered."""
