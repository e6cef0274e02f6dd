"""How likely a causal language model finds texts, and where it puts them: perplexity, and features for MAUVE.

Perplexity is exp(sum of all -log p / number of predicted tokens), natural logarithm; the first token of a text has nothing before it and
is not scored.  Texts are scored in the scorer's own tokens: given ids of the same tokenizer are used as they are, others are
decoded and tokenised again.  The model is an encoder read at its last layer (weights_port/encoder.py) with its output head;
the head runs in float32, because bfloat16 logits would cost two digits.  Features come from the same pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from weights_port.checkpoints import EncoderError
from weights_port.encoder import EncoderInfo, check_length, load_encoder
from weights_port.head import head_bias, head_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers
    import torch

    from jdllm.evaluation.evaluate import Scorer as RunScorer
    from jdllm.evaluation.report import Scores
    from jdllm.generation.generator import Generator

_BATCH_TOKENS = {"cpu": 1024, "cuda": 65_536}
_HEAD_TOKENS = {"cpu": 1024, "cuda": 8192}  # logits of 8192 tokens x 248,320 are 8 GB in float32


class Scorer:
    """A causal language model that judges texts."""

    def __init__(self, name: str = "smollm2", device: str = "auto", dtype: str = "auto", revision: str | None = None):
        import tokenizers
        import torch

        self._encoder = load_encoder(name, layer=-1, device=device, dtype=dtype, revision=revision)
        self.info: EncoderInfo = self._encoder.info
        self.identity: str = self.info.name
        """Name of the model, to be put beside the figures and compared with the encoder's."""
        self.tokenizer = tokenizers.Tokenizer.from_str(self._encoder.tokenizer_json)
        bias = head_bias(self._encoder.checkpoint)
        self._bias = 0.0 if bias is None else torch.from_numpy(bias).to(self._encoder.device)
        self._head = torch.from_numpy(head_matrix(self._encoder.checkpoint)).to(self._encoder.device)

    def perplexity(self, texts: Sequence[str]) -> float:
        """Perplexity of the corpus under the scorer's own tokens; texts of fewer than two tokens count for nothing."""
        ids, lengths = self.encode(texts)
        if (lengths < 2).all():
            raise EncoderError(f"perplexity: none of {len(texts)} texts has two tokens of scorer {self.identity!r}")
        return self.perplexity_of_ids(ids, lengths)

    def encode(self, texts: Sequence[str]) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, " n"]]:
        """The scorer's own tokens of each text, padded, and how many they are."""
        encoded = [e.ids for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in encoded], np.int32)
        ids = np.full((len(encoded), lengths.max(initial=0)), self.info.eos_id, np.int32)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = tokens
        return ids, lengths

    def perplexity_of_ids(self, ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]) -> float:
        """The same of token ids of the scorer's own tokenizer."""
        predicted = int(np.maximum(np.asarray(lengths) - 1, 0).sum())
        if not predicted:
            raise EncoderError("perplexity: no text has two tokens")
        return float(np.exp(self.negative_log_likelihoods(ids, lengths).sum(dtype=np.float64) / predicted))

    def negative_log_likelihoods(
        self, ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "n t-1"]:
        """-log p(token j+1 | tokens 0..j) in nats at column j; zero where token j+1 is padding."""
        return self.read(ids, lengths)[0]

    def read(
        self, ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n t-1"], Float[np.ndarray, "n f"]]:
        """The same, and the mean over a text of its last hidden states but the first; zero for texts of one token.

        The state of the first token is left out, since large models put the same huge activation there in every text.
        """
        ids, lengths = np.asarray(ids, np.int32), np.asarray(lengths, np.int32)
        check_length(self.info, int(lengths.max(initial=0)))
        result = np.zeros((len(ids), max(ids.shape[1] - 1, 0)), np.float32)
        features = np.zeros((len(ids), self.info.hidden_dim), np.float32)
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 1]
        at = 0
        while at < len(order):
            longest = int(lengths[order[at]])
            rows = order[at : at + max(1, _BATCH_TOKENS[self._encoder.device.type] // longest)]
            result[rows, : longest - 1], features[rows] = self._batch(ids[rows, :longest], lengths[rows])
            at += len(rows)
        return result, features

    def _batch(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            states = self._encoder.states(ids, lengths)
            hidden = states[:, :-1]
            targets = torch.from_numpy(ids[:, 1:].astype(np.int64)).to(hidden.device)
            scored = torch.arange(1, ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
            scored = scored.to(hidden.device)
            chosen, wanted = hidden[scored].float(), targets[scored]
            step = _HEAD_TOKENS[hidden.device.type]
            losses = [
                torch.nn.functional.cross_entropy(self._logits(part), goal, reduction="none")
                for part, goal in zip(chosen.split(step), wanted.split(step), strict=True)
            ]
            result = torch.zeros(targets.shape, device=hidden.device)
            result[scored] = torch.cat(losses)
            later = torch.where(scored[..., None], states[:, 1:].float(), 0.0)
            features = later.sum(1) / scored.sum(1, keepdim=True)
            return result.cpu().numpy(), features.cpu().numpy()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(m, d) -> (m, v), with the scalings that Cohere, Granite and Gemma put on their logits."""
        import torch

        config = self._encoder.config
        logits = hidden @ self._head.T + self._bias
        logits = (
            logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        )
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def same_tokenizer(self, tokenizer: tokenizers.Tokenizer) -> bool:
        """Whether ids of that tokenizer can be scored as they are."""
        return tokenizer.to_str() == self.tokenizer.to_str()

    def is_model_of(self, encoder: EncoderInfo) -> bool:
        """Whether this is the very model whose hidden states that encoder gives: the same name, or the same weights."""
        if encoder.name == self.info.name:
            return True
        same_shape = (encoder.hidden_dim, encoder.num_layers) == (self.info.hidden_dim, self.info.num_layers)
        same_dtype = encoder.identity.get("dtype") == self.info.identity["dtype"]
        return (
            same_shape
            and same_dtype
            and self._encoder.weights_digest(max(encoder.layer, 1)) == encoder.identity["weights"]
        )


def scorer_for_run(name: str, run_dir: Path, generator: Generator) -> RunScorer:
    """The scorer as evaluation wants it: a function of the run's token ids."""
    from jdllm.evaluation.evaluate import Scorer as RunScorer

    scorer = Scorer(name)
    encoder = EncoderInfo(**json.loads((run_dir / "data.json").read_text())["encoder"])
    score = scores_of(scorer, generator.tokenizer)
    return RunScorer(name=scorer.identity, score=score, is_encoder=scorer.is_model_of(encoder))


def scores_of(
    scorer: Scorer, tokenizer: tokenizers.Tokenizer
) -> Callable[[Int[np.ndarray, "n t"], Int[np.ndarray, " n"]], Scores]:
    """(ids of that tokenizer, lengths) -> what evaluation reads of each text; ids of another tokenizer are decoded first."""
    from jdllm.evaluation.report import Scores

    own_ids = scorer.same_tokenizer(tokenizer)

    def score(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]) -> Scores:
        if not own_ids:
            rows = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
            ids, lengths = scorer.encode(tokenizer.decode_batch(rows, skip_special_tokens=True))
        nll, features = scorer.read(ids, lengths)
        return Scores(nll.sum(1, dtype=np.float64), np.maximum(lengths - 1, 0), features)

    return score
