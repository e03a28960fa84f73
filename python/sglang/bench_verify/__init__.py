"""One bench that says where the milliseconds of an EAGLE-3 cycle go and whether speculation wins.

Command line: ``python -m sglang.bench_verify --help``. Everything needed to write, read and compare
benchmark files is importable without torch or the rest of SGLang, so any script may use it::

    from sglang.bench_verify.environment import capture, under_load
    from sglang.bench_verify.rows import Metric, Results, Row

    results = Results(environments=[capture()])
    with under_load(results.environments[0]):        # clocks and power while the work runs
        samples = [...]                              # one figure a repeat
    results.add(Row(
        bench="attention",                           # the kind of bench: slice, attention, all_reduce, demo ...
        machine="h200",                              # h200, h200x2, cpu ...: first part of headline names
        variant="fork",                              # fork | upstream
        case={"context": 65536, "batch": 1, "tokens": 3},
        metrics={"mla_verify_us": Metric.of(samples, "us")},
    ))
    results.save("benchmark/results/h200_attention.json")

``benchmark/results/headline.json`` and the tables of the README are generated from such files by
``make readme-tables``; a row reaches the headline when a rule of ``headline.RULES`` matches it.
"""
