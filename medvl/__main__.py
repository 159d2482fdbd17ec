"""`python -m medvl`: the `medvl` command."""

from medvl.cli.main import main

if __name__ == "__main__":
    main()
