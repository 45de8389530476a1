"""`python -m pocketllm` is the `pocketllm` command."""

from pocketllm.cli.main import main

if __name__ == "__main__":
    main()
