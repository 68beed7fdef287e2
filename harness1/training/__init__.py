"""The trainer: rows of tokens in, changed weights out; blind to the algorithm that made the rows."""
