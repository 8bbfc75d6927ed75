"""`python -m megatron_rl`: the command line without the console script."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
