"""`python -m amips`, also for torchrun: `torchrun --nproc-per-node 2 -m amips train ...`."""

from amips.cli import main

if __name__ == "__main__":
    main()
