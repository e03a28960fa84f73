"""Topic ``run-processors``: custom logit processors see every row of a verify with that row's history.

Upstream's verify does not call them at all. A processor is a function of logits, parameters and (through
``__req__``) the request; it is called once with all rows of its requests, each row with its own parameters
whose ``__req__`` shows the output as it would have been there. Rows of rejected drafts are among them, so a
processor must not keep state between calls; plain decoding batches arbitrary requests and asks the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.semantics.row_bias import apply_bias
from sglang.srt.speculative.semantics.row_history import RequestAtRow, output_before_drafts, path_tokens
from sglang.srt.speculative.semantics.verify_tree import candidate_mask

_COMMITTED = "run_committed_ids"


def verify(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None
) -> Any:
    """Around the verify's sampler: grammar, bias, then processors, in plain decoding's order."""
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or not info.has_custom_logit_processor:
        return original(verify_input, batch, logits_output, grammar_mask)

    rows = verify_input.draft_token_num
    logits = logits_output.next_token_logits
    apply_bias(logits, info, rows, grammar_mask)
    info.logit_bias = None
    outputs = _outputs_at_rows(verify_input, batch)
    _process(logits, batch, rows, outputs)
    outcome = original(verify_input, batch, logits_output, None)
    _record_commits(verify_input, batch, outputs, accept_index=outcome[2])
    return outcome


def _wanted(batch: Any) -> list[int]:
    return [index for index, request in enumerate(batch.reqs) if request.custom_logit_processor]


def _outputs_at_rows(verify_input: Any, batch: Any) -> dict[int, list[list[int]]]:
    """Output ids at each row of each request that has a processor.

    Reads the candidates back from the device: the processors run on the host anyway.
    """
    rows = verify_input.draft_token_num
    candidates = verify_input.draft_token.reshape(-1, rows).tolist()
    lengths = batch.seq_lens.tolist()
    mask = candidate_mask(verify_input, verify_input.draft_token.device)
    ancestors = mask.expand(len(candidates), -1, -1).tolist()
    outputs: dict[int, list[list[int]]] = {}
    for index in _wanted(batch):
        request = batch.reqs[index]
        committed = lengths[index] - len(request.origin_input_ids) + 1
        records = [request.output_ids, getattr(request, _COMMITTED, [])]
        base = output_before_drafts(records, candidates[index][0], committed)
        if base is None:
            raise RuntimeError(
                f"request {request.rid}: no record of its output has the {committed} tokens that the verify "
                f"expects (request {len(records[0])}, last commits {len(records[1])}); "
                "report this with the request, or switch off the topic run-processors"
            )
        outputs[index] = [base + path_tokens(candidates[index], path) for path in ancestors[index]]
    return outputs


def _process(logits: torch.Tensor, batch: Any, rows: int, outputs: dict[int, list[list[int]]]) -> None:
    info = batch.sampling_info
    for processor, used in info.custom_logit_processor.values():
        members = used.nonzero(as_tuple=True)[0].tolist()
        index = torch.tensor([m * rows + row for m in members for row in range(rows)], device=logits.device)
        parameters = [
            _parameters_at(info.custom_params[m], batch.reqs[m], outputs[m][row])
            for m in members
            for row in range(rows)
        ]
        logits[index] = processor(logits[index], parameters)


def _parameters_at(
    parameters: dict[str, Any] | None, request: Any, output: list[int]
) -> dict[str, Any] | None:
    if parameters is None:
        return None
    return parameters | ({"__req__": RequestAtRow(request, output)} if "__req__" in parameters else {})


def _record_commits(
    verify_input: Any, batch: Any, outputs: dict[int, list[list[int]]], accept_index: torch.Tensor
) -> None:
    """Remember what the verify committed, short of the new bonus: the host's own list may lag a step."""
    if not batch.enable_overlap:
        return
    rows = verify_input.draft_token_num
    for index, path in enumerate(accept_index.tolist()):
        if index in outputs:
            last = max((row for row in path if row >= 0), default=index * rows) - index * rows
            setattr(batch.reqs[index], _COMMITTED, outputs[index][last])
