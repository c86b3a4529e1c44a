"""`make bench`: all benchmarks, one after the other."""

from bench import cartpole, runtime

if __name__ == "__main__":
    runtime.main([])
    cartpole.main([])
