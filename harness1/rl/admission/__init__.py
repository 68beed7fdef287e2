"""Which tasks a reward is worth optimising on."""
