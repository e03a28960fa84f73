"""Settings: declared once, read as declared, recommended with a reason, and shown to have arrived."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.verify_settings import catalogue, hooks, library, names, nccl_log, profiles, reach, readback
from sglang.srt.verify_settings.declare import SettingError
from sglang.srt.verify_settings.native import shown
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.facts.nccl import parse_conf

HERE = Path(__file__).parent


def test_every_declaration_is_whole() -> None:
    for name, entry in catalogue.declared().items():
        assert name == entry.name and entry.meaning and entry.reader
        assert not entry.meaning.endswith("."), name
        assert (entry.kind == "choice") == bool(entry.choices), name


def test_reading() -> None:
    every = "SGLANG_SPEC_STATS_EVERY"
    assert catalogue.read_int(every, 4, {}) == 4
    assert catalogue.read_int(every, 4, {every: " 2 "}) == 2
    assert catalogue.read_list("SGLANG_FORK_DISABLE", {"SGLANG_FORK_DISABLE": "a, b,,"}) == ["a", "b"]
    assert catalogue.read_flag("CUDA_LAUNCH_BLOCKING", {"CUDA_LAUNCH_BLOCKING": "1"})
    with pytest.raises(SettingError, match="SGLANG_SPEC_STATS_EVERY=0 is below 1; correct it, or unset it"):
        catalogue.read_int(every, 4, {every: "0"})
    with pytest.raises(KeyError, match="is not declared"):
        catalogue.read_text("SGLANG_FORK_NEW_THING", {})


def test_the_pinned_library_reads_what_is_declared() -> None:
    """The names come from the library itself; the list for machines without it is of the same version."""
    found = library.read()
    if not found.names:
        pytest.skip("no NCCL is installed here")
    missing = {name for name in catalogue.declared() if name.startswith("NCCL_")} - found.names
    assert not missing
    if found.version == names.VERSION:
        assert found.names == names.NAMES


def shared_object(**sections: bytes) -> bytes:
    """A 64-bit ELF file that consists of these sections, named with a dot in front."""
    texts, body, entries = b"\0", b"", []
    contents = [(f".{name}".encode(), content) for name, content in sections.items()]
    for name, content in contents:
        entries.append((len(texts), 64 + len(body), len(content)))
        texts += name + b"\0"
        body += content
    entries.append((0, 64 + len(body), len(texts)))
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body) + len(texts))
    header += bytes(10) + struct.pack("<HHH", 64, len(entries), len(entries) - 1)
    table = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in entries
    )
    return header + body + texts + table


BANNER = b"\0NCCL version 2.99.1 compiled\0"


def test_names_are_read_from_the_constants_alone(tmp_path: Path) -> None:
    """Debugging information names constants of the interface that no variable sets; device code is 200 MB."""
    file = tmp_path / "libnccl.so.2"
    file.write_bytes(
        shared_object(text=b"\0NCCL_TEXT\0", rodata=BANNER + b"NCCL_ALGO\0", debug_str=b"\0NCCL_ENUM\0")
    )
    found = library.read(file)
    assert (found.version, found.names) == ("2.99.1", frozenset({"NCCL_ALGO"}))


@pytest.mark.parametrize(
    "content",
    [
        BANNER + b"NCCL_ALGO\0",
        shared_object(data=BANNER + b"NCCL_ALGO\0"),
        shared_object(rodata=b"nothing", data=BANNER + b"NCCL_ALGO\0"),
        shared_object(rodata=BANNER + b"NCCL_ALGO\0")[:-70],
    ],
    ids=["no ELF file", "no constants", "constants without names", "cut off"],
)
def test_a_library_of_another_form_is_read_whole(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "libnccl.so.2"
    file.write_bytes(content)
    found = library.read(file)
    assert (found.version, found.names) == ("2.99.1", frozenset({"NCCL_ALGO"}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NCCL_P2P_LEVL", "NCCL_P2P_LEVEL"),
        ("NCCL_P2PLEVEL", "NCCL_P2P_LEVEL"),
        ("NCCL_MAX_NCHANELS", "NCCL_MAX_NCHANNELS"),
        ("NCCL_BUFFERSIZE", "NCCL_BUFFSIZE"),
        ("SGLANG_FORK_DISABEL", "SGLANG_FORK_DISABLE"),
        ("SGLANG_FROK_DISABLE", "SGLANG_FORK_DISABLE"),
        ("SGLANG_FORK_QUITE_DIFFERENT", None),
    ],
)
def test_a_slip_is_named(name: str, expected: str | None) -> None:
    assert catalogue.slips({name: "1"}, ()) == {name: expected}


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_P2P_LEVEL",
        "NCCL_IB_TIMEOUT",
        "NCCL_OFI_PROVIDER",
        "SGLANG_SPEC_BASELINE",
        "SGLANG_LOG_LEVEL",
        "HOME",
    ],
)
def test_what_somebody_reads_is_no_slip(name: str) -> None:
    assert catalogue.slips({name: "1"}, ()) == {}


def test_every_variable_of_ours_in_the_code_is_declared() -> None:
    """A variable that is read but not declared would be reported as a slip to whoever sets it."""
    import re

    import sglang.srt.verify_settings as package

    ours = Path(package.__file__).parents[2]
    manifest = Path(__file__).resolve().parents[2] / "python" / "sglang"
    files = (
        [ours / file.relative_to(manifest) for file in manifest.rglob("*.py")] if manifest.is_dir() else []
    )
    used = {
        name
        for file in files
        if file.is_file()
        for name in re.findall(
            r"[\"'](SGLANG_(?:FORK|SPEC)_[A-Z0-9_]+)[\"']", file.read_text(encoding="utf-8")
        )
    }
    used -= catalogue.UPSTREAMS
    assert used and used <= catalogue.declared().keys(), used - catalogue.declared().keys()


# -- reach ----------------------------------------------------------------------------------------------------


def test_record_tells_who_set_what() -> None:
    before = {"NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS", "HOME": "x"}
    after = {
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_NTHREADS": "512",
        "HOME": "x",
    }
    added = {"NCCL_NTHREADS": reach.Origin("512", "profile field-report", "because")}
    launch = reach.record(before, after, added)
    assert {name: origin.source for name, origin in launch.origins.items()} == {
        "NCCL_ALGO": reach.UPSTREAM,
        "NCCL_NTHREADS": "profile field-report",
        "NCCL_NVLS_ENABLE": reach.UPSTREAM,
        "NCCL_P2P_LEVEL": reach.USER,
    }
    (change,) = launch.changes
    assert "NCCL_ALGO=Ring, as you set it, became allreduce:tree" in change.text()
    assert "deterministic" in change.text()
    assert reach.load(launch.dump()) == launch


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"origins": 3, "changes": []}'])
def test_a_damaged_record_is_no_record(text: str) -> None:
    assert reach.load(text) is None


def test_differences_between_launcher_and_rank() -> None:
    expected = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_TOPO_FILE": "/a"}
    seen = {"NCCL_ALGO": "Tree", "NCCL_TOPO_FILE": "/b", "NCCL_NTHREADS": "64"}
    assert reach.differences(expected, seen) == [
        "NCCL_ALGO is Tree instead of Ring",
        "NCCL_PROTO=LL did not arrive",
        "NCCL_TOPO_FILE is (set) instead of (set)",
        "NCCL_NTHREADS=64 is set in the rank only",
    ]
    assert reach.differences(expected, expected | {reach.CARRIER: "{}"}) == []


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any variable that the record is about, restored afterwards."""
    kept = dict(os.environ)
    for name in [*reach.carried(os.environ), reach.CARRIER]:
        monkeypatch.delenv(name, raising=False)
    # What the code under test sets has to go again too.
    monkeypatch.setattr(hooks, "_resolved", {})
    monkeypatch.setattr(os, "environ", os.environ)
    yield monkeypatch  # type: ignore[misc]
    for name in set(os.environ) - set(kept):
        del os.environ[name]


def upstream(server_args: object) -> None:
    """Stands in for what upstream does to the environment at start."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["CUDA_MODULE_LOADING"] = "AUTO"


def test_vllm_19105_what_the_user_set_is_kept(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clean.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    clean.setenv("NCCL_CUMEM_ENABLE", "1")
    caplog.set_level("INFO", logger="sglang.fork.settings")
    hooks.launch(upstream, SimpleNamespace(nccl_profile=None))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and os.environ["NCCL_CUMEM_ENABLE"] == "1"
    assert os.environ["CUDA_MODULE_LOADING"] == "AUTO"
    launch = reach.load(os.environ[reach.CARRIER])
    assert launch is not None and not launch.changes
    assert launch.origins["CUDA_DEVICE_MAX_CONNECTIONS"].source == reach.USER
    assert "CUDA_MODULE_LOADING=AUTO (upstream's default)" in caplog.text


def test_what_the_flags_force_is_said(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clean.setenv("NCCL_ALGO", "Ring")

    def resolve(server_args: object) -> None:
        os.environ["NCCL_ALGO"] = "allreduce:tree"

    hooks.resolution(resolve, object())
    hooks.resolution(resolve, object())  # A second ServerArgs in one process changes nothing.
    hooks.launch(upstream, SimpleNamespace(nccl_profile=None))
    assert "NCCL_ALGO=Ring, as you set it, became allreduce:tree" in caplog.text


def test_what_only_the_resolution_set_is_not_the_users(clean: pytest.MonkeyPatch) -> None:
    def resolve(server_args: object) -> None:
        os.environ["NCCL_ALGO"] = "allreduce:tree"

    hooks.resolution(resolve, object())
    hooks.launch(upstream, SimpleNamespace(nccl_profile=None))
    launch = reach.load(os.environ[reach.CARRIER])
    assert launch is not None and launch.origins["NCCL_ALGO"].source == reach.UPSTREAM and not launch.changes


def test_a_profile_fills_in_only_what_is_free(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NCCL_PROTO", "Simple")
    clean.setenv("NCCL_NTHREADS", "")  # counts as unset
    hooks.launch(upstream, SimpleNamespace(nccl_profile="field-report"))
    assert os.environ["NCCL_PROTO"] == "Simple" and os.environ["NCCL_NTHREADS"] == "512"
    launch = reach.load(os.environ[reach.CARRIER])
    assert launch is not None
    assert launch.origins["NCCL_PROTO"].source == reach.USER
    assert (
        launch.origins["NCCL_NTHREADS"].source == "profile field-report"
        and launch.origins["NCCL_NTHREADS"].why
    )


def test_the_flag_wins_over_the_variable(clean: pytest.MonkeyPatch) -> None:
    environment = {profiles.VARIABLE: "auto"}
    assert hooks.wanted(SimpleNamespace(nccl_profile="off"), environment) == "off"
    assert hooks.wanted(SimpleNamespace(nccl_profile=None), environment) == "auto"
    assert hooks.wanted(SimpleNamespace(), {}) == "off"
    with pytest.raises(SettingError, match="did you mean pcie-switch"):
        hooks.wanted(SimpleNamespace(nccl_profile="pcie-swich"), {})


def test_slips_and_bad_values_are_said_at_start(clean: pytest.MonkeyPatch) -> None:
    said = hooks.complaints({"NCCL_P2P_LEVL": "SYS", "NCCL_NTHREADS": "many", "SGLANG_FORK_DISABEL": "x"})
    text = "\n".join(said)
    assert "did you mean NCCL_P2P_LEVEL?" in text and "did you mean SGLANG_FORK_DISABLE?" in text
    assert "NCCL_NTHREADS=many is not a whole number" in text and len(said) == 3


def test_a_bad_value_of_ours_is_one_line_and_status_2(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean.setenv("SGLANG_SPEC_STATS_EVERY", "often")
    with pytest.raises(SystemExit) as left:
        hooks.prepare(lambda argv: SimpleNamespace(), [])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(
        "sglang: error: SGLANG_SPEC_STATS_EVERY=often is not a whole number"
    )


# -- profiles -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """A recorded or constructed machine, and the profile that fits it."""

    name: str
    profile: str | None


MACHINES = (
    Machine("cpu_without_gpu", None),
    Machine("h200_x2_nvlink", "nvlink"),
    Machine("rtxpro6000_x8_two_sockets", "pcie-two-sockets"),
    Machine("rtxpro6000_x8_iommu_translation", "pcie-no-p2p"),
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_profile_of_a_machine(machine: Machine) -> None:
    facts = document.read(HERE / "facts" / f"{machine.name}.json")
    chosen, why = profiles.choose(profiles.links(facts))
    assert (chosen.name if chosen else None) == machine.profile and why


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (profiles.Links("PIX"), "pcie-switch"),
        (profiles.Links("PXB"), "pcie-switch"),
        (profiles.Links("PHB"), "pcie-one-socket"),
        (profiles.Links("NODE"), "pcie-one-socket"),
        (profiles.Links("SYS"), "pcie-two-sockets"),
        (profiles.Links("PIX", redirecting=True), "pcie-no-p2p"),
        (profiles.Links("PHB", denied=True), "pcie-no-p2p"),
        (profiles.Links("NV", translation=True), "nvlink"),
    ],
)
def test_choice(found: profiles.Links, expected: str) -> None:
    chosen, _ = profiles.choose(found)
    assert chosen is not None and chosen.name == expected


def test_every_value_is_declared_valid_and_has_its_reason() -> None:
    for profile in profiles.PROFILES.values():
        assert profile.when
        for name, entry in profile.values.items():
            assert entry.reason and entry.source
            assert catalogue.setting(name).problem(entry.value) is None


# -- what NCCL says -------------------------------------------------------------------------------------------

LOG = """\
node:100:100 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
node:100:100 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
node:100:131 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to SYS
node:100:131 [0] NCCL INFO NCCL_CUMEM_ENABLE set by environment to 0.
node:100:131 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
node:100:131 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct
node:100:131 [0] NCCL INFO 4 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 8 p2p channels per peer
node:100:131 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 'peer access is not supported'
"""


def test_nccl_log() -> None:
    found = nccl_log.parse(LOG)
    assert found.version == "2.28.9" and found.channels == 4
    assert found.settings == {"NCCL_P2P_LEVEL": "SYS", "NCCL_CUMEM_ENABLE": "0"}
    assert found.transports == {"P2P/IPC": 1, "SHM/direct/direct": 1}
    assert found.warnings == ["Cuda failure 'peer access is not supported'"]
    assert nccl_log.parse("") == nccl_log.NcclLog()
    assert nccl_log.contradictions({"NCCL_P2P_LEVEL": "PXB"}, found) == [
        "NCCL read NCCL_P2P_LEVEL as SYS, but it is set to PXB"
    ]


def test_a_rank_reads_its_own_log(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NCCL_DEBUG", "INFO")
    clean.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.%h.%p.log"))
    clean.setenv("NCCL_P2P_LEVEL", "PXB")
    path = nccl_log.log_file(dict(os.environ), os.getpid(), os.uname().nodename.split(".")[0])
    assert path is not None
    assert readback.own_record(0)["nccl_log"] is None
    path.write_text(LOG)
    record = readback.own_record(0)
    assert record["nccl_log"]["transports"] == {"P2P/IPC": 1, "SHM/direct/direct": 1}
    assert "NCCL read NCCL_P2P_LEVEL as SYS" in " ".join(record["differs"])
    assert record["variables"]["NCCL_DEBUG_FILE"] == "(set)"
    assert readback.complaints([record, record | {"differs": None}])


def test_files_of_nccl() -> None:
    assert parse_conf("# all\nNCCL_PROTO=LL # small\n\nNCCL_ALGO = Ring\nnonsense\n") == {
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
    }


def test_paths_are_not_shown() -> None:
    assert shown({"NCCL_TOPO_FILE": "/home/me", "NCCL_ALGO": "Ring", "SGLANG_FORK_WHEELS": "/x"}) == {
        "NCCL_ALGO": "Ring",
        "NCCL_TOPO_FILE": "(set)",
        "SGLANG_FORK_WHEELS": "(set)",
    }
