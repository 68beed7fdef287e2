"""`python -m harness1` is `harness1`."""

from harness1.cli.main import run

if __name__ == "__main__":
    run()
