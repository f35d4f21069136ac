"""`python -m forge_train`: the same as `forge-train`."""

from forge_train.cli import main

if __name__ == "__main__":
    main()
