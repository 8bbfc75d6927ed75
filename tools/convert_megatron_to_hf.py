"""`megatron-rl convert --to hf`: see `--help` and README.md beside this file."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "hf", *sys.argv[1:]]))
