"""`build`: from a task and a model, or a design, to an index with measured operating points."""

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from amips.arguments import check_choice, check_flag, check_number, check_recall, check_seed, refused
from amips.builder.builder import Builder
from amips.builder.graphs import graph_design
from amips.design import OWN, SPILL_FRACTION, Design, GraphStorage, Storage, Structure
from amips.errors import AmipsError, RunError
from amips.metrics import TARGET_RECALL
from amips.nets import DEFAULT_MINUTES, Model, Recipe, is_unfinished_run, load_model, spec_of
from amips.resources import plain_resource_errors
from amips.search import (
    KEEP_LOG,
    Attributes,
    Index,
    Opened,
    check_bundle_place,
    check_labels,
    checked_keep_log,
    checked_second,
    read_table,
    save,
    with_facts,
)
from amips.task import Task, load_task


@plain_resource_errors()
def build(
    task: Task | str | Path,
    model: Any = None,
    *,
    out: str | Path | None = None,
    design: Design | None = None,
    storage: Storage | None = None,
    dimensions: int | None = None,
    spill_fraction: float | None = None,
    second_cells: Any = None,
    stop: str | None = None,
    structure: Structure | None = None,
    recall: float = TARGET_RECALL,
    ids: Any = None,
    attributes: Any = None,
    minutes: float = DEFAULT_MINUTES,
    seed: int = 0,
    keep_log: int | bool = KEEP_LOG,
    progress: bool = False,
) -> Index:
    """Put the keys of a task into an index that a model routes, and measure it on the val queries.

    Without options it makes what `amips.fit` usually chooses: lean storage, half of the keys in a second
    cell.

    Args:
        task: a task or its directory; its cells are the cells of the index, unless a design has others.
        model: what `train` returned, a run directory, any object with `scores(x)`, or None for centroids.
        out: where to save the bundle; None keeps it in memory.
        design: what to make, in place of the options below; its router is trained if no model is given.
        storage: "flat", "sq8", "pq" or "lean" (see `Design`); lean where that saves anything, if None.
        dimensions: of lean storage; if None, the fewest that keep 99 % of the top keys among the candidates.
        spill_fraction: of the keys that are put into a second cell, too; a half if None.
        second_cells: the second cell of each key [n], -1 for none, if you have your own.
        stop: "mass" or "probes", see `Design`; "mass" if None.
        structure: "cells", if None; or "graph": edges from the keys and from the queries of the task, walked
            by codes of the storage, and no model. See `Design.graph`.
        recall: the recall@10 that `search` serves if it is asked for nothing else.
        ids: what to return for each key instead of 0..n-1: n whole numbers or n strings.
        attributes: of the keys, for `search(..., where=)`: an Arrow table, a data frame, or a Parquet or
            Arrow file, one row a key.
        minutes: of training a design's router, at most.
        keep_log: training queries to keep in the bundle, at most, and a fifth of that held out: what
            `drift` compares traffic with, and `refit` mixes in. False for none.
    """
    if out is not None:
        check_bundle_place(out)  # before the work, not after it
    recall, seed = check_recall(recall), check_seed(seed)
    minutes = check_number("minutes", minutes, above=0)
    progress = check_flag("progress", progress)
    if design is not None and not isinstance(design, Design):
        raise refused("design", design, "a Design")
    if structure is not None:
        check_choice("structure", structure, Structure)
    task = load_task(task)
    model = _opened(model)
    labels = None if ids is None else check_labels(ids, task.n)
    known = None if attributes is None else Attributes.of(read_table(attributes, task.n))
    second = None if second_cells is None else checked_second(second_cells, task.cells)
    if task.shares_sources:
        warnings.warn(
            "held-out rows of this task have relatives in train: the recall that is measured on them is that "
            "of queries that come again, not of new ones",
            stacklevel=2,
        )
    options = {"storage": storage, "dimensions": dimensions, "spill_fraction": spill_fraction, "stop": stop}
    keep = checked_keep_log(keep_log)
    builder = Builder(task, minutes=minutes, recall=recall, seed=seed, progress=progress, keep_log=keep)
    if structure == "graph" and design is None:
        of_cells = {
            "model": model,
            "spill_fraction": spill_fraction,
            "second_cells": second_cells,
            "stop": stop,
        }
        if wrong := [name for name, value in of_cells.items() if value is not None]:
            raise AmipsError(f"{wrong[0]}: a graph has none; leave it out, or take structure='cells'")
        design = graph_design(task, storage=cast("GraphStorage | None", storage), dimensions=dimensions)
    elif design is not None:
        if structure not in (None, design.structure):
            raise AmipsError("structure is part of the design: give one of the two")
        if design.structure == "graph" and (model is not None or second_cells is not None):
            raise AmipsError("the design is a graph, which has no model and no second_cells: leave them out")
        if wrong := [name for name, value in options.items() if value is not None]:
            raise AmipsError(f"{wrong[0]} is part of the design: give one of the two")
        if model is None and design.router is not None:
            model = OWN  # the builder is to make it
        elif model is not None:
            design = _with_model(design, model, task)
    else:
        if second_cells is not None:
            options["spill_fraction"] = 0.0 if second is None else float((second >= 0).mean())
        fields_of_design = {name: value for name, value in options.items() if value is not None}
        if dimensions is not None and storage is None:
            fields_of_design["storage"] = "lean"
        design = default_design(task, model, builder=builder, **fields_of_design)
    index = with_facts(builder.index(design, model, second=second), labels=labels, attributes=known)
    if out is None:
        return Index(index)
    save(index, out)
    return Index(index, Opened.at(Path(out)))


def default_design(
    task: Task, model: Any = None, *, builder: Builder | None = None, **options: Any
) -> Design:
    """What `build` makes of a task and a model without options: the measured recipe.

    Args:
        options: fields of `Design` that are to be otherwise.
    """
    builder = builder or Builder(task)
    router = None if model is None else spec_of(model) if isinstance(model, Model) else OWN
    recipe = _recipe_of(model) or Recipe()
    values: dict[str, Any] = {"query_aware": task.query_aware, "router": router, "recipe": recipe}
    values["spill_fraction"] = SPILL_FRACTION if task.c > 1 else 0.0
    if "storage" not in options:
        values["storage"] = "flat" if builder.lean_dimensions() is None else "lean"
    return builder.resolved(Design(task.c, **{**values, **options}))


def _with_model(design: Design, model: Any, task: Task) -> Design:
    """The design with the recipe that its model states; AmipsError if its router is not that of the model.

    A design whose router is "own" takes any model.
    """
    if isinstance(design.router, str):
        return design
    if design.router is None:
        raise AmipsError("the design routes by centroids, and there is a model: give one of the two")
    if not isinstance(model, Model):
        raise AmipsError(f"the design has a {design.router_name}, not this model: set its router to 'own'")
    spec, router = spec_of(model), design.router
    same = type(spec) is type(router) and getattr(spec, "smooth", None) == getattr(router, "smooth", None)
    if not same or router.architecture(task.n, task.d, model.c) != model.architecture:
        name = replace(design, router=spec, recipe=Recipe()).resolved(task.d).router_name
        raise AmipsError(f"the design has a {design.router_name}, the model is a {name}: give one of the two")
    return replace(design, recipe=_recipe_of(model) or design.recipe or Recipe())


def _recipe_of(model: Any) -> Recipe | None:
    """The recipe that a model states it was trained with."""
    if not isinstance(model, Model) or not isinstance(stated := model.about.get("recipe"), dict):
        return None
    names = {field.name for field in fields(Recipe)}  # an older model may state what there is no more
    return Recipe.from_json({name: value for name, value in stated.items() if name in names})


def _opened(model: Any) -> Any:
    """A model from its run directory; anything else as it is."""
    if not isinstance(model, (str, Path)):
        return model
    if not Path(model).exists():
        raise RunError(f"{model} does not exist")
    if is_unfinished_run(model):
        raise RunError(f"{model} is an unfinished run; continue it with resume=True (--resume)")
    return load_model(model)
