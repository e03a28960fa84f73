from patches.engine import Call, InsertAfter, InsertAtTop, Topic

TOPIC = Topic(
    name="fork-report",
    why=(
        "A server must say which fork it is and which topics are in force, and the diagnostics must run "
        "where the rest of the package cannot be imported."
    ),
    upstream="none: describes the fork itself",
    retire_when="the fork ends",
    detect="never while there is a fork to report",
    overlay=("sglang/fork/", "sglang/verify_doctor/"),
    edits=(
        InsertAtTop(file="sglang/__init__.py", hook="sglang.fork.early:run_diagnostics"),
        InsertAfter(
            file="sglang/srt/entrypoints/engine.py",
            scope="Engine._launch_subprocesses",
            match=Call("configure_logger"),
            hook="sglang.fork.startup:log_report",
        ),
    ),
)
