"""One module a command of `python -m sglang.bench_verify`."""
