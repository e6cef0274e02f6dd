"""Cells merge without loss, and the report says no more than their numbers."""

import json

import pytest

from jdllm.config import ConfigError
from jdllm.evaluation import cell_report, cells


def record(name="full", seed=0, perplexity=100.0, status="done", entropy=3.0, budget="1800 steps", **changes):
    figures = {"perplexity": perplexity, "entropy": entropy, "mauve": 0.5, "repetition_4": 0.01}
    done = status == "done"
    return {
        "name": name, "seed": seed, "size": "third", "budget": budget, "status": status,
        "reason": None if done else "step 9: because", "question": f"asks {name}", "config": {},
        "gpu_minutes": 2.0, "side_by_side": 1, "train": {"recon": 0.9, "step": 1800, "minutes": 2.0} if done else {},
        "samples": {"10": {**figures, "perplexity": 2 * perplexity}, "32": figures} if done else {},
        "human": {"perplexity": 50.0, "entropy": 3.1, "mauve": 0.9} if done else None, "scorer": "x" if done else None,
        "scorer_is_encoder": True, "texts": [f"text of {name}"], "command": "run it", "commit": "abc", **changes,
    }  # fmt: skip


def findings(*records):
    (section,) = cells.groups(records).values()
    return cell_report.findings(section, records[0]["human"])


def test_merging_keeps_every_cell_and_the_better_of_two():
    one = [record("a"), record("b", status="failed")]
    two = [record("a", perplexity=7.0), record("b"), record("c", status="diverged")]
    three = [record("b", status="failed"), record("a", seed=1), record("a", budget="10 minutes")]
    merged = cells.merge(one, two, three)
    found = {cells.key(r): (r["status"], (r["samples"].get("32") or {}).get("perplexity")) for r in merged}
    assert found == {
        ("a", 0, "third", "1800 steps"): ("done", 7.0), ("b", 0, "third", "1800 steps"): ("done", 100.0),
        ("c", 0, "third", "1800 steps"): ("diverged", None), ("a", 1, "third", "1800 steps"): ("done", 100.0),
        ("a", 0, "third", "10 minutes"): ("done", 100.0),
    }  # fmt: skip
    assert cells.merge(merged, merged) == merged


def test_summary_has_the_schema_a_row_a_number_of_steps_the_human_text_and_what_diverged():
    rows = cells.summary([record(), record("bad", status="diverged")])
    assert all(set(cells.SCHEMA) <= set(row) for row in rows)
    assert [(r["name"], r["steps"], r["gen_ppl"]) for r in rows] == [
        ("full", 10, 200.0), ("full", 32, 100.0), ("bad", None, None), ("human", None, 50.0),
    ]  # fmt: skip
    assert rows[2]["status"] == "diverged" and rows[-1]["mauve"] == 0.9


def test_table_has_mean_and_standard_deviation_over_seeds():
    (section,) = cells.groups([record(), record(seed=1, perplexity=110.0), record("one")]).values()
    table = cell_report.table(section, None)
    assert "| `full` | 2 seeds | 105.0 ± 7.1 | – | 3.000 ± 0.000 |" in table
    assert "| `one` | 1 seed | 100.0 | – | 3.000 |" in table


def test_a_diverged_seed_stands_beside_the_others_and_is_not_in_the_mean():
    text = findings(record(), record("x"), record("x", seed=1, status="diverged"))
    assert "seed 1 diverged (step 9: because)" in text[1] and "perplexity 100.0" in text[1]
    (section,) = cells.groups([record("x"), record("x", seed=1, status="diverged")]).values()
    assert "| `x` | 1 seed, 1 diverged | 100.0 |" in cell_report.table(section, None)
    assert findings(record(), record("x", status="collapsed"))[1].endswith("seed 0 collapsed (step 9: because).")


def test_one_seed_each_is_said_to_prove_nothing():
    assert (
        "one seed each, so it is not known how much of this is chance"
        in findings(record(), record("x", perplexity=150.0))[1]
    )


def test_a_difference_is_put_beside_the_spread_of_the_seeds():
    text = findings(record(), record(seed=1, perplexity=104.0), record("x", perplexity=130.0))[1]
    assert "+27.5%" in text and "the difference is 9.9 times the larger standard deviation" in text


def test_texts_of_different_entropy_are_not_ranked_by_perplexity():
    text = findings(record(), record(seed=1), record("x", perplexity=50.0, entropy=2.5))[1]
    assert "so perplexity alone does not rank the two" in text and "standard deviation" not in text


def test_at_equal_entropy_they_are():
    def equal(value, **changes):
        made = record(**changes)
        made["samples"]["32"]["perplexity_at_human_entropy"] = value
        return made

    records = equal(200.0), equal(210.0, seed=1), equal(150.0, name="x", perplexity=50.0, entropy=2.5)
    text = findings(*records)[1]
    assert "at human entropy perplexity 150.0, -26.8%" in text and "does not rank" not in text
    assert "the difference is 7.8 times the larger standard deviation" in text
    assert cells.summary(records)[1]["gen_ppl_at_human_entropy"] == 200.0
    assert "| `full` | 2 seeds | 100.0 ± 0.0 | 205.0 ± 7.1 |" in cell_report.table(
        next(iter(cells.groups(records).values())), None
    )


def test_without_the_full_recipe_nothing_is_compared():
    assert "nothing is compared" in findings(record("x"))[0]


def test_budgets_are_not_mixed():
    sections = cells.groups([record(), record("x", budget="10 minutes")])
    assert [[cell.name for cell in section] for section in sections.values()] == [["full"], ["x"]]


def test_an_autoregressive_model_is_shown_by_its_only_number_of_steps():
    ar = record("autoregressive", perplexity=60.0)
    ar["samples"] = {"64": ar["samples"]["32"]}
    (section,) = cells.groups([record(), ar]).values()
    assert section[1].mean("perplexity") == 60.0 and section[0].steps == "32"


def test_files_are_a_report_for_people_and_for_programs(tmp_path):
    records = [record(), record("x", status="diverged"), record("masked", scorer_is_encoder=False)]
    cell_report.write(tmp_path / "new", records, {"title": "ablation-x", "text": "What."})
    readme = (tmp_path / "new" / "README.md").read_text()
    assert "that flatters them, and not the baselines" in readme and "different models" not in readme
    assert "human text" in readme and "![cells](cells.png)" in readme
    assert "at abc: `run it`" in readme
    assert (tmp_path / "new" / "cells.png").stat().st_size > 5000
    assert cells.read(tmp_path / "new" / "cells.json") == records
    assert len(json.loads((tmp_path / "new" / "summary.json").read_text())) == 6
    assert "> text of full" in (tmp_path / "new" / "samples.md").read_text()


def test_a_torn_file_is_not_overwritten(tmp_path):
    (tmp_path / "cells.json").write_text('[{"name"')
    with pytest.raises(ConfigError, match="restore it from git"):
        cells.read(tmp_path / "cells.json")
