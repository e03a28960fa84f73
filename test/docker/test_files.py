"""Dockerfiles, scripts, compose file and dashboard, judged without a container engine."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted([DOCKER / "Dockerfile", *DOCKER.glob("*.Dockerfile")])
SCRIPTS = ("entrypoint", "install-fork", "slim-cuda")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def tool(name: str) -> str:
    """A linter from requirements/dev.txt."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (requirements/dev.txt)")
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path: Path) -> None:
    done = subprocess.run([tool("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck(name: str) -> None:
    path = DOCKER / name
    assert path.stat().st_mode & 0o111, "not executable"
    done = subprocess.run([tool("shellcheck"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linters_find_something(tmp_path: Path) -> None:
    """Negative control of both."""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN sudo apt-get install curl\n", encoding="utf-8")
    assert subprocess.run([tool("hadolint"), str(bad)], capture_output=True, check=False).returncode != 0
    script = tmp_path / "script"
    script.write_text("#!/bin/bash\nrm $1/*\n", encoding="utf-8")
    assert subprocess.run([tool("shellcheck"), str(script)], capture_output=True, check=False).returncode != 0


Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """Instructions with their arguments, continuation lines joined, comments gone."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8")).replace("\\\n", " ")
    return [
        (line.split(None, 1)[0].upper(), line.split(None, 1)[1]) for line in text.splitlines() if line.strip()
    ]


def last_stage(path: Path) -> list[Instruction]:
    """What stands after the last FROM."""
    found = instructions(path)
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_rules_that_hadolint_has_not(path: Path) -> None:
    """Base pinned by digest, no root, everything written below the volume, health check, exec forms."""
    found = instructions(path)
    (base,) = [value for name, value in found if name == "ARG" and value.startswith("BASE=")]
    assert DIGEST.search(base), base
    assert {value.split()[0] for name, value in found if name == "FROM"} == {"${BASE}"}
    stage = last_stage(path)
    names = [name for name, _ in stage]
    for needed in ("HEALTHCHECK", "VOLUME", "USER", "STOPSIGNAL"):
        assert needed in names, needed
    assert dict(stage)["USER"] == "${UID}" and ("ARG", "UID=10001") in stage
    # Nothing runs, and nothing is copied, after the user changed: those files would be the server's to change.
    assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])
    assert "ADD" not in names
    assert json.loads(dict(stage)["ENTRYPOINT"]) == ["/opt/fast-verify/bin/entrypoint"]
    assert "healthcheck.py" in dict(stage)["HEALTHCHECK"]
    environment = dict(pair.split("=", 1) for pair in dict(stage)["ENV"].split())
    writes = {key: value for key, value in environment.items() if value.startswith("/")}
    assert all(value.startswith(("/cache", "/tmp")) for value in writes.values()), writes
    for needed in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        assert needed in writes
    # The secret of a hub, or anything like one, is never baked in.
    assert not re.search(r"(?i)token|password|secret", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_reaches_the_build(path: Path) -> None:
    ignored = (DOCKER / f"{path.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for name, value in instructions(path):
        if name != "COPY" or value == ". .":
            continue
        *sources, _ = value.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == entry or source.startswith(f"{entry}/") for entry in allowed), source
    for needed in (
        "setup.py",
        "upstream.toml",
        "patches",
        "python",
        "sgl-kernel",
        "pyproject.toml",
        "LICENSE",
    ):
        assert needed in allowed


def test_the_base_is_the_pinned_version() -> None:
    text = (ROOT / "upstream.toml").read_text(encoding="utf-8")
    version = re.search(r'\[upstream\]\nname = "sglang"\nversion = "(.+)"', text)
    assert version is not None
    assert f"lmsysorg/sglang:v{version[1]}@sha256:" in (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def compose() -> dict[str, Any]:
    """The compose file with its anchors resolved."""
    loaded = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("name", ("server", "server-cpu", "prometheus", "grafana"))
def test_compose_service(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service["ports"]:
        assert port.startswith("127.0.0.1:"), "reachable from outside"
    for volume in service["volumes"]:
        source, target, *mode = volume.split(":")
        if source.startswith("./"):
            assert (DOCKER / source).exists() and mode == ["ro"], volume
        else:
            assert source in compose()["volumes"] and target.startswith("/")
    if "build" in service:
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert any(entry.startswith("/tmp") for entry in service["tmpfs"])
        assert "30000:30000" in service["ports"][0]
    else:
        assert DIGEST.search(service["image"])


def test_compose_leaves_the_entrypoint_time_to_stop_the_server() -> None:
    grace = int(re.search(r"STOP_GRACE_S:-(\d+)", (DOCKER / "entrypoint").read_text(encoding="utf-8"))[1])  # type: ignore[index]
    for name in ("server", "server-cpu"):
        assert int(compose()["services"][name]["stop_grace_period"].removesuffix("s")) > grace


def test_the_default_recipe_exists() -> None:
    (command,) = [word for word in compose()["services"]["server"]["command"] if "recipes" in word]
    name = re.sub(r"\$\{RECIPE:-(.+)\}", r"\1", command)
    assert (ROOT / "recipes" / Path(name).name).is_file()


def panels() -> Any:
    """docker/grafana/panels.py as a module."""
    spec = importlib.util.spec_from_file_location("panels", DOCKER / "grafana" / "panels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["panels"] = module
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_the_one_that_the_panels_describe() -> None:
    committed = (DOCKER / "grafana" / "dashboards" / "verification.json").read_text(encoding="utf-8")
    assert committed == panels().text(), "run python docker/grafana/panels.py"


def test_the_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels().dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def queries() -> dict[str, str]:
    """Every expression of dashboard and alerts, by where it stands."""
    found = {}
    dashboard = json.loads(
        (DOCKER / "grafana" / "dashboards" / "verification.json").read_text(encoding="utf-8")
    )
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    found["variable"] = dashboard["templating"]["list"][0]["query"]["query"]
    alerts = yaml.safe_load((DOCKER / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    for rule in alerts["groups"][0]["rules"]:
        found[rule["alert"]] = rule["expr"]
    return found


def upstream_metrics() -> set[str]:
    """Names of metrics in the composed server's code; a histogram's series carry endings."""
    import sglang

    names = set()
    for path in (Path(sglang.__file__).parent / "srt" / "observability").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                kind = ast.unparse(node.func).lower()
                for keyword in node.keywords:
                    if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                        name = str(keyword.value.value)
                        names |= (
                            {f"{name}_{end}" for end in ("bucket", "sum", "count")}
                            if "hist" in kind
                            else {name}
                        )
    return names


def own_metrics() -> dict[str, set[str]]:
    """Labels by name of what the publisher really creates, for a window in which everything happened."""
    from prometheus_client import REGISTRY
    from sglang.srt.speculative.stats import metrics
    from sglang.srt.speculative.stats.alarm import AcceptanceAlarm
    from sglang.srt.speculative.stats.breakeven import Verdict
    from sglang.srt.speculative.stats.collector import Window
    from sglang.srt.speculative.stats.totals import PHASES

    # A publisher of another test of this process may have left its metrics in the one registry.
    for collector in {c for n, c in REGISTRY._names_to_collectors.items() if n.startswith("sglang:spec")}:
        REGISTRY.unregister(collector)
    before = set(REGISTRY._names_to_collectors)
    made = metrics.Publisher({"model_name": "m"})
    window = Window(timed=1)
    window.phases.add(dict.fromkeys(PHASES, 1.0))
    window.kept.add(3)
    verdict = Verdict(**{name: 1.0 for name in Verdict.__dataclass_fields__})
    counts = {
        'graph_replays{pass="verify"}': 1,
        'eager_passes{pass="verify"}': 1,
        'verify_graph_steps{kind="verify",reason="replayed"}': 1,
        'auto_steps{mode="speculative"}': 1,
        'auto_switches{to="plain"}': 1,
        "run_tokens_behind_end": 1,
    }
    made.publish(window, verdict, AcceptanceAlarm(), {"path": {"reason": 1}}, counts, 1)
    found = {}
    for name in set(REGISTRY._names_to_collectors) - before:
        collector = REGISTRY._names_to_collectors[name]
        found[name] = set(getattr(collector, "_labelnames", ()))
    for metric in made._made.values():
        REGISTRY.unregister(metric)
    return found


NAME = re.compile(r"\bsglang:\w+")


def test_every_metric_of_a_query_exists() -> None:
    upstream, own = upstream_metrics(), own_metrics()
    documented = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for place, expression in queries().items():
        names = NAME.findall(expression)
        assert names or place == "ServerUnreachable", place
        for name in names:
            assert name in upstream | set(own), f"{place}: nobody publishes {name}"
            if name not in upstream:
                assert f"`{name}`" in documented, f"{name} is not in docs/metrics.md"
                for labels in re.findall(r"\bby \(([^)]*)\)", expression):
                    wanted = {label.strip() for label in labels.split(",")}
                    # A ratio's other side may be grouped by labels of its own.
                    assert any(wanted <= own.get(other, set()) for other in names), (place, wanted)


def test_a_metric_that_nobody_publishes_is_found() -> None:
    """Negative control of the collection above."""
    upstream, own = upstream_metrics(), own_metrics()
    assert {"sglang:spec_cycle_ms", "sglang:spec_fallbacks_total"} <= set(own)
    assert {"sglang:num_running_reqs", "sglang:time_to_first_token_seconds_bucket"} <= upstream
    assert "sglang:spec_cycle_seconds" not in upstream | set(own)


def test_every_documented_metric_has_a_panel_or_an_alert() -> None:
    """Phase seconds are for long-term sums; what the publisher makes besides is shown."""
    documented = set(NAME.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    shown = set(NAME.findall(" ".join(queries().values())))
    left = {"sglang:spec_phase_seconds_total", "sglang:spec_timed_cycles_total", "sglang:spec_COUNTER_total"}
    assert (documented & set(own_metrics())) - left - shown == set()


def test_brackets_and_selectors_of_queries_are_closed() -> None:
    for place, expression in queries().items():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), place
