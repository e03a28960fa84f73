"""The prefetch on a GPU: ranges up to the end of an allocation, beside other work in a graph; no value changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    from sglang.srt.speculative.cycle_graph.prefetch.kernel import unsupported

    reason = unsupported(torch.device("cuda", torch.cuda.current_device()))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("size", (16, 8192, 8208, 262_160, 5_000_016, 33_554_432))
def test_prefetch_leaves_the_memory_as_it_is(size: int) -> None:
    from sglang.srt.speculative.cycle_graph.prefetch.kernel import prefetch

    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    before = memory.cpu()
    for _ in range(3):
        prefetch(memory)
        prefetch(memory[size // 32 * 16 : size])
    torch.cuda.synchronize()
    assert torch.equal(memory.cpu(), before)


def test_prefetch_beside_a_product_in_a_graph() -> None:
    from sglang.srt.speculative.cycle_graph.prefetch.branch import Branch
    from sglang.srt.speculative.cycle_graph.prefetch.plan import Part, weight_of

    weight = torch.randn(1024, 2048, dtype=torch.bfloat16, device="cuda")
    found, reason = weight_of("w", weight)
    assert found is not None, reason
    part = Part("w", 0, found.memory)
    x = torch.randn(3, 2048, dtype=torch.bfloat16, device="cuda")
    branch = Branch("cuda")
    # Compiled and the library warm before the capture.
    branch.ask("warm", [part])
    branch.join()
    expected = x @ weight.T
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        branch.ask("point", [part])
        y = (y * 0.5) @ weight.T
        branch.join()
    for _ in range(100):
        y.zero_()
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, expected)
