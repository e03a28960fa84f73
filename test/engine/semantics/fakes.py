"""Stand-ins for upstream's requests and batches: only the fields that the code under test reads.

Methods are upstream's own, bound to the stand-in, so that "what plain decoding does" is upstream's answer
and not ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

VOCABULARY = 97
EOS = 2


class CharacterTokenizer:
    """One character a token; ids 0 to 25 are letters, the rest digits, so stop strings may span tokens."""

    eos_token_id = EOS
    additional_stop_token_ids: set[int] | None = None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + i) if i < 26 else str(i % 10) for i in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) - ord("a") for c in text]


class FakeRequest:
    """Enough of a request to run upstream's finish check token by token or run by run."""

    update_finish_state = Req.update_finish_state
    finished = Req.finished
    output_ids_through_stop = Req.output_ids_through_stop
    tail_str = Req.tail_str
    update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram
    _stop_match_tail_len = Req._stop_match_tail_len
    _check_token_based_finish = Req._check_token_based_finish
    _locate_str_stop_finished_len = Req._locate_str_stop_finished_len
    _check_str_based_finish = Req._check_str_based_finish
    _check_vocab_boundary_finish = Req._check_vocab_boundary_finish

    def __init__(self, output: Sequence[int] = (), prompt: Sequence[int] = (5, 6), **parameters: Any) -> None:
        self.rid = "request"
        self.tokenizer = CharacterTokenizer()
        self.sampling_params = SamplingParams(**parameters)
        self.sampling_params.normalize(self.tokenizer)
        self.eos_token_ids: set[int] | None = None
        self.vocab_size = VOCABULARY
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q", output)
        self.decoded_text = ""
        self.to_finish: Any = None
        self.finished_reason: Any = None
        self.finished_len: int | None = None
        self.grammar: Any = None
        self.is_retracted = False
        self.kv_committed_len = len(prompt) + max(len(output) - 1, 0)
        self.spec_verify_ct = 0
        self.spec_num_correct_drafts = 0
        self.spec_correct_drafts_histogram: list[int] = []
        self.custom_logit_processor: str | None = None


class FakeAlgorithm:
    """A speculative algorithm by name; ``none`` is plain decoding."""

    def __init__(self, name: str = "eagle") -> None:
        self.name = name
        for family in ("none", "eagle", "standalone", "ngram"):
            setattr(self, f"is_{family}", lambda family=family: self.name == family)


class FakeBatch:
    """A batch with requests; weakly referable, as the penalisers need it."""

    def __init__(
        self, requests: Sequence[FakeRequest], *, algorithm: str = "eagle", overlap: bool = False
    ) -> None:
        self.reqs = list(requests)
        self.device = "cpu"
        self.spec_algorithm = FakeAlgorithm(algorithm)
        self.enable_overlap = overlap
        self.forward_mode = SimpleNamespace(is_idle=lambda: False)
        self.sampling_info: Any = None
        self.seq_lens = torch.tensor(
            [len(r.origin_input_ids) + max(len(r.output_ids) - 1, 0) for r in requests]
        )


def chain_input(candidates: torch.Tensor) -> SimpleNamespace:
    """A verify of chains: ``candidates`` int ``[B, T]``."""
    batch, rows = candidates.shape
    following = torch.arange(1, rows + 1).expand(batch, rows).clone()
    following[:, -1] = -1
    return SimpleNamespace(
        draft_token=candidates.reshape(-1),
        draft_token_num=rows,
        tree_topk=1,
        max_tree_depth=rows,
        retrieve_index=torch.arange(batch * rows).reshape(batch, rows),
        retrieve_next_token=following,
        retrieve_next_sibling=torch.full((batch, rows), -1),
        positions=torch.zeros(batch * rows, dtype=torch.int64),
    )


def accept_chain(
    candidates: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept along a chain: (predicted ``[B * T]``, lengths with the bonus ``[B]``, accepted rows ``[B, T]``)."""
    batch, rows = candidates.shape
    matched = (candidates[:, 1:] == drawn[:, :-1]).int().cumprod(1).sum(1)
    index = torch.arange(batch * rows).reshape(batch, rows)
    kept = torch.arange(rows).unsqueeze(0) <= matched.unsqueeze(1)
    return drawn.reshape(-1), matched + 1, torch.where(kept, index, -1)
