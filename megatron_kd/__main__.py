"""``python -m megatron_kd`` and ``torchrun -m megatron_kd``."""

from megatron_kd.cli import main

# Saving a checkpoint spawns a helper process that imports this module again: it must not start a second run.
if __name__ == "__main__":
    main()
