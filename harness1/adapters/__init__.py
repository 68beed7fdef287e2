"""What other projects need to train and evaluate with the harness."""
