"""NCCL variables that decide how ranks of one machine reach each other. Meanings follow NVIDIA's documentation.

NCCL reads many more; which ones, the library itself tells (``library.names``).
"""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Kind, Setting

NCCL = "NCCL, when a communicator is made"
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PXN", "PHB", "NODE", "SYS", "0", "1", "2", "3", "4", "5")
LOG_LEVELS = (
    "VERSION",
    "WARN",
    "INFO",
    "ABORT",
    "TRACE",
    "NONE",
    "version",
    "warn",
    "info",
    "abort",
    "trace",
)


def _nccl(
    name: str,
    kind: Kind,
    default: str,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Setting:
    return Setting(f"NCCL_{name}", kind, default, meaning, NCCL, choices, least, most)


SETTINGS = (
    _nccl(
        "P2P_LEVEL",
        "choice",
        "(by processor and topology)",
        "The farthest path over which GPUs write to each other directly; beyond it data goes through host memory",
        choices=LEVELS,
    ),
    _nccl("P2P_DISABLE", "flag", "0", "GPUs never write to each other directly"),
    _nccl("P2P_DIRECT_DISABLE", "flag", "0", "No direct user-buffer access between GPUs of one process"),
    _nccl("P2P_READ_ENABLE", "int", "(by topology)", "Peers read instead of write", least=-2, most=1),
    _nccl("P2P_USE_CUDA_MEMCPY", "flag", "0", "Peer traffic by copy engines instead of kernels"),
    _nccl(
        "SHM_DISABLE", "flag", "0", "No shared host memory between ranks: what cannot go P2P goes by sockets"
    ),
    _nccl("PROTO", "text", "(by size)", "Protocols allowed: LL, LL128, Simple, or ^ and the forbidden ones"),
    _nccl("ALGO", "text", "(by size)", "Algorithms allowed: Ring, Tree, NVLS, or operation:list"),
    _nccl("NTHREADS", "int", "(by GPU)", "Threads of one block of a collective", least=64, most=1024),
    _nccl("BUFFSIZE", "int", "4194304", "Bytes of the buffer between two GPUs, a channel", least=1024),
    _nccl("LL_BUFFSIZE", "int", "(by protocol)", "Bytes of that buffer for protocol LL", least=1024),
    _nccl(
        "MIN_NCHANNELS", "int", "(by topology)", "Fewest channels (blocks) of a collective", least=1, most=64
    ),
    _nccl(
        "MAX_NCHANNELS", "int", "(by topology)", "Most channels (blocks) of a collective", least=1, most=64
    ),
    _nccl("MIN_CTAS", "int", "(by topology)", "Fewest blocks that NCCL may use", least=1, most=64),
    _nccl("MAX_CTAS", "int", "(by topology)", "Most blocks that NCCL may use", least=1, most=64),
    _nccl(
        "CUMEM_ENABLE",
        "int",
        "0 (upstream sets it)",
        "Buffers from CUDA's virtual memory calls",
        least=-2,
        most=1,
    ),
    _nccl("CUMEM_HOST_ENABLE", "int", "(by driver)", "The same for host memory", least=-1, most=1),
    _nccl("NVLS_ENABLE", "int", "0 (upstream sets it)", "Reductions inside NVLink switches", least=0, most=2),
    _nccl("MNNVL_ENABLE", "int", "(by machine)", "NVLink between machines", least=0, most=2),
    _nccl(
        "GRAPH_MIXING_SUPPORT", "flag", "1", "Captured and eager collectives may be mixed on one communicator"
    ),
    _nccl("GRAPH_REGISTER", "flag", "1", "User buffers of captured graphs are registered"),
    _nccl("LOCAL_REGISTER", "flag", "1", "User buffers are registered when the program asks for it"),
    _nccl(
        "LAUNCH_MODE",
        "choice",
        "PARALLEL",
        "How several GPUs of one process launch",
        choices=("PARALLEL", "GROUP"),
    ),
    _nccl("IGNORE_DISABLED_P2P", "flag", "0", "Go on where the driver reports P2P as switched off"),
    _nccl("TOPO_FILE", "path", "", "A topology that is read before the machine's own"),
    _nccl("GRAPH_FILE", "path", "", "Rings and trees that are used as they stand in a file"),
    _nccl("SOCKET_IFNAME", "text", "(by machine)", "Network interfaces that ranks meet over"),
    _nccl("SOCKET_FAMILY", "choice", "(both)", "IPv4 or IPv6", choices=("AF_INET", "AF_INET6")),
    _nccl("IB_DISABLE", "flag", "0", "No InfiniBand"),
    _nccl(
        "NET_GDR_LEVEL",
        "choice",
        "(by topology)",
        "Farthest path from network card to GPU memory",
        choices=LEVELS,
    ),
    _nccl("TUNER_PLUGIN", "text", "", "A library that chooses algorithm and protocol"),
    _nccl("RUNTIME_CONNECT", "flag", "1", "Connections are made at the first use instead of at the start"),
    _nccl("DEBUG", "choice", "(nothing)", "What NCCL logs", choices=LOG_LEVELS),
    _nccl("DEBUG_SUBSYS", "list", "INIT,BOOTSTRAP,ENV", "Parts that NCCL logs"),
    _nccl("DEBUG_FILE", "path", "(standard output)", "Where the log goes; %h is the host, %p the process"),
    _nccl(
        "CONF_FILE",
        "path",
        "~/.nccl.conf, then /etc/nccl.conf",
        "A file of NCCL variables; the environment wins",
    ),
)
