"""From a failed preflight and a topology to the cure a person should try first. Pure functions."""

from __future__ import annotations

from sglang.srt.distributed.one_shot.topology import Topology

P2P_OFF = "NCCL_P2P_DISABLE=1"

#: Kinds of failure that the preflight tells apart.
LOST = "lost"  # the pattern never arrived: no flag came, or not every packet
WRONG = "wrong"  # a flag came, the bytes are not the pattern
LATE = "late"  # the rank itself did not answer
SLOW = "slow"  # everything works, and took longer than the preflight may
REFUSED = "refused"  # the driver would not map the peer's memory
SUM = "sum"  # every pair works, the reduction does not
KERNEL = "kernel"  # the kernel does not load or run at all


def cure(kind: str, link: str, topology: Topology) -> str:
    """One sentence: the most likely cause that these facts allow, and what to do about it.

    Args:
        kind: one of the constants above.
        link: class of the path between the two GPUs (``topology.LINKS``).
        topology: facts of the machine.
    """
    if kind == KERNEL:
        return "rebuild the kernels for this GPU, or look at `python -m sglang.verify_doctor`"
    if kind == LATE:
        return "look at that rank's log: it failed, or was slow to start"
    if kind == SLOW:
        return "raise SGLANG_FORK_ALL_REDUCE_PREFLIGHT_S if the machine was merely busy; NCCL is in use meanwhile"
    if kind == SUM:
        return "report this with the table that `python -m sglang.bench_all_reduce` prints; NCCL is in use meanwhile"
    if topology.mig:
        return "MIG instances have no peer access: switch MIG off, or serve on one instance"
    if link == "NV":
        return "check the NVLinks (`nvidia-smi nvlink --status`) and the fabric manager"
    if kind == REFUSED:
        if topology.virtual:
            return "the virtual machine hides peer access; ask its owner, or leave NCCL in charge"
        if topology.denied:
            return "the driver denies peer access for this GPU; use a driver with P2P for it, or leave NCCL in charge"
        return "ranks of separate containers need a shared IPC namespace (--ipc host)"
    # Bytes that do not reach their owner on PCIe: what stands between the two GPUs, most likely first.
    if topology.redirecting:
        bridge = topology.redirecting[0].removeprefix("0000:")
        return (
            f"ACS redirects peer writes at {topology.redirecting[0]}: switch it off in the firmware or with "
            f"`setpci -s {bridge} ECAP_ACS+0x6.w=0000`; until then {P2P_OFF}"
        )
    if topology.iommu == "translation" and not topology.virtual:
        return f"the IOMMU translates peer writes: start the kernel with iommu=pt; until then {P2P_OFF}"
    if topology.denied:
        return f"a driver override forces peer access that the driver denies: remove it; until then {P2P_OFF}"
    if not topology.acs_known:
        return f"run the doctor as root to see ACS, start the kernel with iommu=pt; until then {P2P_OFF}"
    if link == "SYS":
        return f"this platform loses peer writes between sockets: NCCL_P2P_LEVEL=NODE, or {P2P_OFF}"
    return (
        f"this platform loses peer writes on {link}: {P2P_OFF}, then firmware (ACS, IOMMU, Above 4G Decoding)"
    )
