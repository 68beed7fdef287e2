"""What holds the weights in training and takes the optimizer steps: this machine, or a service."""
