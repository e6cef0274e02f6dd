"""The grid of experiments/ablate_recipe.py: its cells are what they say, and their commands give their configs."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jdllm import cli
from jdllm.config import ConfigError, preset


def load(name):
    path = Path(__file__).parents[1] / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


ablation = load("ablate_recipe")
NAMES = [cell.name for cell in ablation.grid(preset("books"))]


@pytest.fixture(params=["third", "whole"])
def options(request):
    return ablation.Options(size=request.param, cell_minutes=2.0)


def test_every_cell_is_a_config_that_differs_from_the_full_recipe(options):
    jobs = {job.name: job for job in ablation.jobs(options) if job.seed == 0}
    assert list(jobs) == NAMES
    configs = [job.config for job in jobs.values()]
    assert len(set(configs)) == len(configs) == len(ablation.grid(preset("books")))


def test_the_command_of_a_cell_gives_its_config(options):
    for job in ablation.jobs(options):
        train, evaluate = ablation.commands(job, options)
        parsed = cli.parse(train[4:], command="train")
        assert parsed.config == job.config and parsed.name == job.run_name, job.name
        assert Path(evaluate[5]) == parsed.runs_dir / parsed.name


def test_main_questions_come_first_then_seeds_of_the_extremes_then_the_rest():
    order = [(job.name, job.seed) for job in ablation.jobs(ablation.Options(seeds=3))]
    assert order[:2] == [("full", 0), ("naive", 0)]
    assert order[9:13] == [("full", 1), ("naive", 1), ("full", 2), ("naive", 2)]
    assert {seed for _, seed in order[13 : 13 + len(NAMES) - 9]} == {0}
    assert len(order) == len(set(order)) == 3 * len(NAMES)


def test_naive_has_none_of_the_four_ingredients():
    (job,) = ablation.jobs(ablation.Options(cells="naive", seeds=1))
    o = job.config.objective
    assert (o.decoder_loss, o.gamma_min, o.gamma_max, o.gamma_gate, o.decoder_noise) == ("ce", 1.0, 1.0, 0.0, 0.0)
    assert job.config.diffusion.timesteps == "uniform"


def test_a_cell_that_the_config_does_not_know_is_skipped_with_a_sentence(monkeypatch, capsys):
    grid = ablation.grid
    future = ablation.Cell("future", "a kind of model to come", {"model__kind_to_come": "x"})
    monkeypatch.setattr(ablation, "grid", lambda base: [*grid(base)[:1], future])
    assert [job.name for job in ablation.jobs(ablation.Options(seeds=1))] == ["full"]
    assert "future: skipped, this config has no such choice" in capsys.readouterr().out


def test_unknown_cells_and_unfair_minutes_are_refused():
    with pytest.raises(ConfigError, match="no cell 'ful'; there are: full, naive"):
        ablation.jobs(ablation.Options(cells="ful"))
    with pytest.raises(ConfigError, match="share a card"):
        ablation.ablate(ablation.Options(cell_minutes=1.0, side_by_side=2))


def test_a_stored_recipe_is_known_again_and_a_changed_default_is_not():
    (job,) = ablation.jobs(ablation.Options(cells="full", seeds=1))
    stored = job.config.to_dict()
    assert ablation.same_recipe(stored, job.config.replace(data="elsewhere/books", feed__cache_dir="x"))
    del stored["objective"]["frozen_after"]  # a key that is younger than the result
    assert ablation.same_recipe(stored, job.config)
    assert not ablation.same_recipe(stored, job.config.replace(objective__gamma_max=0.25))
    assert not ablation.same_recipe({**stored, "gone": 1}, job.config)
    assert not ablation.same_recipe(
        stored, job.config.replace(objective__frozen_after=0.5)
    )  # a run may, a cell may not
