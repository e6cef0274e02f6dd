"""Equal entropy by interpolation, never by extrapolation; findings follow the numbers."""

import dataclasses
import json

import numpy as np
import pytest

from jdllm.evaluation import cells, frontier, frontier_report
from jdllm.evaluation.frontier import Row, at_entropy, equal_entropy, findings

HUMAN = {
    "perplexity": 50.0, "entropy": 4.0, "mauve": 0.9, "repetition_4": 0.0, "tokens": 64.0,
    "intervals": {"perplexity": (48.0, 52.0), "entropy": (3.99, 4.01)},
}  # fmt: skip


def row(way="ddim", steps=8, temperature=1.0, perplexity=100.0, entropy=4.0, kind="ldlm", run=None, ms=(2.0, 64.0)):
    figures = {
        "perplexity": perplexity, "entropy": entropy, "mauve": 0.5, "repetition_4": 0.01, "tokens": 64.0,
        "intervals": {"perplexity": (0.9 * perplexity, 1.1 * perplexity), "entropy": (entropy - 0.01, entropy + 0.01)},
    }  # fmt: skip
    return Row(
        run=run or kind, kind=kind, seed=0, checkpoint=100, gpu_minutes=3.0, recon=0.9, way=way, steps=steps,
        temperature=temperature, num=512, figures=figures, human=HUMAN, milliseconds={"1": ms[0], "64": ms[1]}, scorer="x",
        scorer_is_encoder=kind == "ldlm", command="run it", commit="abc",
    )  # fmt: skip


def points(*rows):
    return equal_entropy(rows, HUMAN["entropy"], (1, 64))


def test_interpolation_is_linear_and_stops_at_the_ends():
    assert at_entropy([3.0, 4.0, 5.0], [10.0, 20.0, 60.0], 4.5) == 40.0
    assert at_entropy([5.0, 3.0], [60.0, 10.0], 4.0) == 35.0, "either direction"
    assert at_entropy([3.0, 3.9], [10.0, 20.0], 4.0) is None
    assert at_entropy([4.0001], [7.0], 4.0) == 7.0 and at_entropy([4.1], [7.0], 4.0) is None


def test_perplexity_at_equal_entropy_lies_between_its_neighbours_on_a_log_scale():
    (p,) = points(row(temperature=0.9, perplexity=50.0, entropy=3.8), row(perplexity=200.0, entropy=4.2))
    assert p.perplexity == pytest.approx(100.0) and p.temperature == pytest.approx(0.95)
    assert (p.low, p.high) == pytest.approx((90.0, 110.0))
    assert p.ms == {"1": 2.0, "64": 1.0}, "of one sequence"


def test_safe_text_does_not_win_by_low_perplexity():
    # The same curve of perplexity over entropy, sampled at two temperatures: a lower one gains nothing.
    def curve(entropy):
        return 100.0 * np.exp(2 * (entropy - 4.0))

    safe = [row("safe", 8, t, curve(e), e) for t, e in ((0.7, 3.5), (1.0, 4.1))]
    bold = [row("bold", 8, t, curve(e), e) for t, e in ((0.9, 3.9), (1.1, 4.3))]
    one, other = points(*safe, *bold)
    assert one.perplexity == pytest.approx(other.perplexity) == pytest.approx(100.0)


def test_what_never_has_the_entropy_is_named_and_not_compared():
    rows = [row(), row("sde", perplexity=10.0, entropy=3.0)]
    assert [p.way for p in points(*rows)] == ["ddim"]
    said = findings(rows, points(*rows), (1,))
    assert "1 ways never have the entropy of human text" in said[-1] and "ldlm sde in 8" in said[-1]


def test_kinds_stand_beside_each_other_with_times():
    rows = [
        row(),
        row("confidence", 8, kind="masked", perplexity=150.0),
        row("plain", 64, kind="autoregressive", perplexity=60.0),
    ]
    said = findings(rows, points(*rows), (1, 64))
    assert said[0].startswith(
        "LDLM in 8 steps (ddim): perplexity 100.0 [90.0, 110.0], 2.00 x human, 2.00 ms a sequence"
    )
    assert (
        "masked in 8 (confidence): perplexity 150.0" in said[0]
        and "autoregressive in 64 (plain): perplexity 60.0" in said[0]
    )


def test_it_says_where_latent_diffusion_loses():
    slow = row("confidence", 8, kind="masked", perplexity=50.0, ms=(9.0, 64.0))
    rows = [row(), slow]
    said = findings(rows, points(*rows), (1, 64))
    assert "At batch 1, 0 of 1 LDLM points have a baseline that is better and no slower." in said
    assert (
        "At batch 64, 1 of 1 LDLM points have a baseline that is better and no slower: ddim in 8 to masked in 8 (confidence)."
        in said
    )


def test_ways_are_put_against_the_default_with_their_doubt():
    far, near = row("sde", perplexity=50.0), row("sde", perplexity=95.0)
    assert any("-50.0%" in s and "do not overlap" in s for s in findings([row(), far], points(row(), far), ()))
    assert any("-5.0%" in s and "intervals overlap" in s for s in findings([row(), near], points(row(), near), ()))
    worse = row("sde", perplexity=120.0)
    assert any("none of 2 ways" in s for s in findings([row(), worse], points(row(), worse), ()))


def test_summary_has_the_schema_for_both_batches_and_human_text():
    rows = frontier.summary([row()], (1, 64))
    assert all(set(cells.SCHEMA) <= set(r) for r in rows)
    assert [(r["name"], r["batch"], r["ms_per_sequence"]) for r in rows] == [
        ("ldlm ddim", 1, 2.0), ("ldlm ddim", 64, 1.0), ("human", None, None),
    ]  # fmt: skip


def test_files_are_written_and_read_back(tmp_path):
    rows = [row(), row("sde", 16), row("confidence", 8, kind="masked"), row("plain", 64, kind="autoregressive")]
    frontier_report.write(tmp_path, rows, (1, 64), "What.")
    again = frontier_report.read(tmp_path)
    assert [r.key for r in again] == [r.key for r in rows]
    assert json.loads(json.dumps(dataclasses.asdict(again[0]))) == json.loads(json.dumps(dataclasses.asdict(rows[0])))
    text = (tmp_path / "README.md").read_text()
    assert (
        "that flatters them, and not the baselines" in text
        and "| ldlm | sde | – | 100.0 [90.0, 110.0]<br>2.00 / 1.00 ms |" in text
    )
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("frontier.png", "entropy.png"))


def test_nothing_measured_yet_is_a_report_too(tmp_path):
    frontier_report.write(tmp_path, [], (1, 64), "What.")
    assert "Nothing to compare yet" in (tmp_path / "README.md").read_text()


def test_a_sheet_has_a_column_a_source_and_keeps_line_breaks_visible():
    sheet = frontier_report.samples_sheet({"one": ["a\nb", "c|d"], "human": ["e"]}, "Seed 0.")
    assert "| 1 | a ⏎ b | e |" in sheet and "| 2 | c\\|d |  |" in sheet


def test_samples_of_earlier_runs_stay_on_the_sheet(tmp_path):
    frontier_report.write_samples(tmp_path, {"ldlm": ["old"], "masked": ["m"]}, ["h"], "Seed 0.")
    frontier_report.write_samples(tmp_path, {"ldlm": ["new"], "ar": ["a"]}, ["h"], "Seed 0.")
    assert "| 1 | new | m | a | h |" in (tmp_path / "samples.md").read_text()
