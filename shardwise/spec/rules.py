"""From a plain tree to a :class:`RunConfig`, with every rule that needs neither model nor devices.

What is wrong is said in one message: the dotted key with its value, the rule, the nearest thing that
works. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardwise.config import NOT_AVAILABLE, nearest
from shardwise.errors import ConfigError
from shardwise.spec.learning_rate import check_schedule_settings
from shardwise.spec.ranges import check_last_step, parse_steps
from shardwise.spec.run import COLUMNS, TRACKERS, RunConfig, data_sources, tracker_names

BEST_METRICS = ("eval_loss",)

# Keys of the contract whose feature is not built yet: the values that leave the feature out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "strategy.cp": (None, 1),
    "strategy.ep": (None, 1),
}

# What others call a value of ours, where the nearest in spelling is another one.
_OTHER_NAMES = {"gpu": "cuda", "ascend": "npu"}


def parse_run(tree: dict[str, Any], planned: bool = False) -> RunConfig:
    """The run that a tree describes; paths in it are relative to the working directory.

    A run that is only ``planned`` may ask for what this version cannot train with yet.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong kind, a feature
            that is not built yet, or keys that contradict each other.
    """
    try:
        run = RunConfig.model_validate(_without_empty_sections(tree, RunConfig))
    except ValidationError as error:
        raise _config_error(error.errors(include_url=False)) from None
    for check in _CHECKS:
        if not (planned and check is _check_available):
            check(run)
    return run


def known_keys() -> list[str]:
    """Every key of the contract in dotted form, sections included."""
    return list(_walk(RunConfig, ""))


def get(run: RunConfig, dotted: str) -> Any:
    """The value at a dotted key, as the contract spells it (``save.async``)."""
    value: Any = run
    for part in dotted.split("."):
        value = getattr(value, "async_" if part == "async" else part)
    return value


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class that a field holds, for ``X`` and for ``X | None``."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in _fields(model).items():
        key = prefix + name
        yield key
        section = _section(field.annotation)
        if section is not None:
            yield from _walk(section, f"{key}.")


def _without_empty_sections(tree: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A section whose lines are all commented out reads as null, and means its defaults."""
    sections = {name for name, field in model.model_fields.items() if _section(field.annotation)}
    return {key: value for key, value in tree.items() if value is not None or key not in sections}


def _config_error(errors: list[ErrorDetails]) -> ConfigError:
    """One message for all that is wrong; the kinds that a value may have are joined by ``or``."""
    found: dict[str, tuple[str, list[str], str]] = {}
    for place, error in _innermost(errors):
        key = place.key
        shown = key if error["type"] in ("missing", "invalid_key") else f"{key} = {error['input']!r}"
        rule, remedy = _explain(error, place)
        known = found.setdefault(key, (shown, [], remedy))
        if rule not in known[1]:
            known[1].append(rule)
    (value, rules, remedy), *others = found.values()
    more = [f"Also {shown}: {_either(rules)}" + (f" ({hint})" if hint else "") for shown, rules, hint in others]
    return ConfigError(value, _either(rules), ". ".join(filter(None, [remedy, *more])))


def _either(rules: list[str]) -> str:
    return ", or ".join([rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])])


class _Place(NamedTuple):
    """Where an error lies: ``strategy.stages[0]`` of StrategyConfig; ``section`` if a section should stand there."""

    key: str
    owner: type[BaseModel]
    section: type[BaseModel] | None


def _innermost(errors: list[ErrorDetails]) -> list[tuple[_Place, ErrorDetails]]:
    """Each error with its place; of a list that might have been a text, what is wrong inside it."""
    placed = [(_place(error["loc"]), error) for error in errors]
    keys = {place.key for place, _ in placed}
    return [(place, error) for place, error in placed if not any(key.startswith(f"{place.key}[") for key in keys)]


def _place(location: tuple[int | str, ...]) -> _Place:
    """The place of ``('strategy', 'stages', 0)``; names of union branches are left out of the key."""
    key = ""
    owner: type[BaseModel] = RunConfig
    model: type[BaseModel] | None = RunConfig
    annotation: Any = None
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
            model = _item(annotation)
        elif model is not None:
            key += f".{part}" if key else part
            owner = model
            field = _fields(model).get(part)
            annotation = field.annotation if field else None
            model = _section(annotation)
    return _Place(key, owner, model)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _item(annotation: Any) -> type[BaseModel] | None:
    """The section class that the items of a list are, for a field that may hold such a list."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is tuple:
            return _section(get_args(candidate)[0])
    return None


def _explain(error: ErrorDetails, place: _Place) -> tuple[str, str]:
    kind, given, key = error["type"], error["input"], place.key
    if kind == "extra_forbidden":
        return "unknown key", _suggest(key, place.owner)
    if kind == "missing":
        return "missing", f"Give it as {key}=VALUE"
    if kind == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = _OTHER_NAMES.get(str(given).lower()) or nearest(str(given).lower(), choices)
        return f"must be {error['ctx']['expected']}", f"Did you mean {near}?" if near else ""
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(_fields(place.section or place.owner))
        return "is a section of keys, not a value", f"Write {key}.KEY=..., one of {keys}"
    if kind == "tuple_type":
        return "must be a list", "Write it in brackets, such as [4, 3]"
    if kind == "dict_type":
        return "must be names with values", "Write it in braces, such as {prompt: question, response: answer}"
    if kind == "string_type":
        return "must be text", f"Write it in quotes: {key}='{given}'" if isinstance(given, int | float) else ""
    if kind == "value_error":
        return str(error["ctx"]["error"]), ""
    return error["msg"].replace("Input should be", "must be"), ""


def _suggest(key: str, owner: type[BaseModel]) -> str:
    """The nearest key of the same section, else the same name in another section, else what there is."""
    section, _, name = key.rpartition(".")
    siblings = list(_fields(owner))
    near = nearest(name, siblings)
    if near is not None:
        return f"Did you mean {section + '.' if section else ''}{near}?"
    by_name = {known.rpartition(".")[2]: known for known in known_keys()}
    other = nearest(name, by_name, cutoff=0.75)  # other sections have many short names
    return f"Did you mean {by_name[other]}?" if other else f"Known keys here: {', '.join(siblings)}"


def _check_available(run: RunConfig) -> None:
    for key, neutral in _NEUTRAL.items():
        value = get(run, key)
        if value not in neutral:
            works = next((choice for choice in neutral if choice not in (None, ())), None)
            names = str(works).lower()
            shown = (
                f"{key} = {value.model_dump(exclude_unset=True)}"
                if isinstance(value, BaseModel)
                else f"{key} = {value!r}"
            )
            raise ConfigError(shown, NOT_AVAILABLE, "Leave it out" if works is None else f"Use {key}: {names}")
    if run.strategy.recompute == "selective":
        raise ConfigError("strategy.recompute = 'selective'", NOT_AVAILABLE, "Use none, full or a number of blocks")


def _refuse(unless: bool, value: str, rule: str, remedy: str) -> None:
    if not unless:
        raise ConfigError(value, rule, remedy)


def _check_batch(run: RunConfig) -> None:
    rows, accumulation = run.train.global_batch_size, run.train.gradient_accumulation_steps
    _refuse(
        rows is None or accumulation is None,
        f"train.global_batch_size = {rows} and train.gradient_accumulation_steps = {accumulation}",
        "are two ways to say the same thing",
        "Give one of them",
    )
    _refuse(
        accumulation is None or run.strategy.micro_batch_size is not None,
        f"train.gradient_accumulation_steps = {accumulation}",
        "needs strategy.micro_batch_size: the global batch is their product over all data ranks",
        "Give strategy.micro_batch_size, or train.global_batch_size instead",
    )


def _check_schedule(run: RunConfig) -> None:
    schedule, virtual = run.strategy.schedule, run.strategy.virtual_stages
    _refuse(
        schedule == "interleaved" or virtual in (None, 1),
        f"strategy.virtual_stages = {virtual}",
        f"several stages on a rank are the schedule interleaved, and strategy.schedule is {schedule}",
        "Use strategy.schedule=interleaved, or leave it out",
    )
    _refuse(
        schedule != "interleaved" or virtual != 1,
        "strategy.virtual_stages = 1 with strategy.schedule = interleaved",
        "one stage on a rank leaves nothing to interleave",
        "Use strategy.virtual_stages=2, or strategy.schedule=1f1b",
    )


def _check_tables(run: RunConfig) -> None:
    strategy = run.strategy
    _refuse(
        strategy.tp_whole is None or strategy.plan is not None or (strategy.tp or 1) > 1,
        f"strategy.tp_whole = {strategy.tp_whole}",
        f"chooses how a block is split over the tensor ranks, and strategy.tp is {strategy.tp or 'not given'}",
        "Give strategy.tp=2 or more, or leave it out",
    )


def _check_length(run: RunConfig) -> None:
    epochs, steps = run.train.epochs, run.train.max_steps
    _refuse(
        epochs is None or steps is None,
        f"train.epochs = {epochs} and train.max_steps = {steps}",
        "only one of them can end the run",
        "Give one of them",
    )
    warmup_steps, ratio = run.train.warmup_steps, run.train.warmup_ratio
    _refuse(
        not (warmup_steps and ratio),
        f"train.warmup_steps = {warmup_steps} and train.warmup_ratio = {ratio}",
        "only one of them can set the warm-up",
        "Give one of them",
    )


def _check_packing(run: RunConfig) -> None:
    _refuse(
        not (run.data.group_by_length and run.data.packing),
        "data.group_by_length = true with data.packing = true",
        "both are against padding, and packing leaves none to group for",
        "Give one of them",
    )
    _refuse(
        run.data.shuffle or not run.data.group_by_length,
        "data.group_by_length = true with data.shuffle = false",
        "it changes the order of the rows, which is to be that of the file",
        "Give one of them",
    )


def _check_optimizer(run: RunConfig) -> None:
    """An option of the other optimizer would be ignored; nothing is ignored silently."""
    train = run.train
    foreign = ("momentum",) if train.optimizer == "adamw" else ("adam_beta1", "adam_beta2", "adam_eps")
    other = {"adamw": "sgd", "sgd": "adamw"}[train.optimizer]
    for name in foreign:
        _refuse(
            getattr(train, name) == type(train).model_fields[name].default,
            f"train.{name} = {getattr(train, name)}",
            f"belongs to the optimizer {other}, and train.optimizer is {train.optimizer}",
            f"Leave train.{name} out, or use train.optimizer: {other}",
        )
    check_schedule_settings(train)


def _check_compile(run: RunConfig) -> None:
    dropout = run.lora.dropout if run.lora is not None else 0.0
    _refuse(
        not (run.train.compile and dropout),
        f"train.compile = true with lora.dropout = {dropout}",
        "masks of adapters are drawn by name, which does not compile",
        "Use lora.dropout: 0, or train.compile: false",
    )


def _check_interval(key: str, strategy: str, steps: int | None) -> None:
    _refuse(
        strategy != "steps" or steps is not None,
        f"{key}.strategy = 'steps'",
        f"needs {key}.steps, the number of steps between two",
        f"Give {key}.steps=100, or {key}.strategy=epoch",
    )
    _refuse(
        strategy == "steps" or steps is None,
        f"{key}.steps = {steps}",
        f"has no effect while {key}.strategy is {strategy}",
        f"Set {key}.strategy: steps, or leave {key}.steps out",
    )


def _check_save(run: RunConfig) -> None:
    _check_interval("save", run.save.strategy, run.save.steps)
    _refuse(
        not run.overwrite or run.resume == "no",
        f"overwrite = true with resume = {run.resume!r}",
        "it would delete the checkpoints that the run is to go on from",
        "Use overwrite=false to go on, or resume=no to start anew",
    )
    _refuse(
        not run.save.async_ or run.save.strategy != "no",
        "save.async = true",
        "has no effect while save.strategy is no",
        "Give save.strategy, or leave save.async out",
    )
    _check_best(run)


def _check_best(run: RunConfig) -> None:
    """Every checkpoint is to have an evaluation of its own step, else there is nothing to compare it by."""
    save, evaluation = run.save, run.eval
    _refuse(
        save.export != "best" or save.best != "no",
        "save.export = 'best'",
        "needs save.best, which says what is best",
        "Give save.best=eval_loss, or save.export=true",
    )
    if save.best == "no":
        return
    value = f"save.best = {save.best!r}"
    _refuse(save.best in BEST_METRICS, value, f"must be no or {' or '.join(BEST_METRICS)}", "Did you mean eval_loss?")
    _refuse(save.strategy != "no", value, "has no effect while save.strategy is no", "Give save.strategy")
    _refuse(evaluation.strategy != "no", value, "needs evaluations, and eval.strategy is no", "Give eval.strategy")
    fits = save.strategy == evaluation.strategy and (save.steps or 1) % (evaluation.steps or 1) == 0
    shown = [f"{section} {each.steps or each.strategy}" for section, each in (("save", save), ("eval", evaluation))]
    _refuse(
        fits,
        f"{value} with {' and '.join(shown)}",
        "every checkpoint needs an evaluation of its step",
        "Use the same strategy for both, and save.steps a multiple of eval.steps",
    )


def _check_data(run: RunConfig) -> None:
    for key, given in (("data.train", run.data.train), ("data.eval", run.data.eval)):
        _refuse(
            not isinstance(given, tuple) or len(given) > 0,
            f"{key} = []",
            "names no source of rows",
            f"Give {key}=FILE.jsonl",
        )
    weights = [source.weight for source in data_sources(run.data.train)]
    _refuse(
        None not in weights or not any(weights),
        f"data.train with the weights {weights}",
        "either all sources have a weight or none",
        "Give each a weight, such as {path: FILE, weight: 1}",
    )
    _refuse(
        not any(source.weight for source in data_sources(run.data.eval)),
        "data.eval with weights",
        "rows are evaluated once each",
        "Leave the weights out",
    )
    _check_columns("data.columns", run.data.columns)
    for key, sources in (("data.train", run.data.train), ("data.eval", run.data.eval)):
        for source in data_sources(sources):
            _check_columns(f"columns of {source.path} in {key}", source.columns)
    length = run.data.max_length
    _refuse(
        run.data.on_long != "split" or length is None or length > 1,
        f"data.on_long = split with data.max_length = {length}",
        "a row of one token has nothing to predict",
        "Use data.max_length=2 or more",
    )
    size = run.data.val_size or None
    _refuse(
        size is None or run.data.eval is None,
        f"data.val_size = {size} and data.eval = {run.data.eval!r}",
        "are two ways to name the rows to evaluate",
        "Give one of them",
    )
    _refuse(
        size is None or size < 1 or size == int(size),
        f"data.val_size = {size}",
        "must be a share below 1, or a whole number of rows",
        f"Use data.val_size={int(size or 0)}",
    )


def _check_columns(key: str, columns: dict[str, str] | None) -> None:
    for known, own in (columns or {}).items():
        near = nearest(known, COLUMNS)
        _refuse(
            known in COLUMNS,
            f"{key} = {{{known}: {own}}}",
            f"{known} is no name of a column that formats have: {', '.join(COLUMNS)}",
            f"Did you mean {near}?" if near else "Write {name that is known: name in the file}",
        )


def _check_eval(run: RunConfig) -> None:
    _check_interval("eval", run.eval.strategy, run.eval.steps)
    _refuse(
        run.eval.strategy == "no" or run.data.eval is not None or bool(run.data.val_size),
        f"eval.strategy = {run.eval.strategy!r}",
        "needs rows to evaluate",
        "Give data.eval=FILE or data.val_size=0.05, or eval.strategy=no",
    )
    patience = run.train.early_stopping_patience
    _refuse(
        patience is None or run.eval.strategy != "no",
        f"train.early_stopping_patience = {patience}",
        "counts evaluations, and eval.strategy is no",
        "Give data.eval=FILE and eval.strategy=epoch, or leave it out",
    )


def _check_lora(run: RunConfig) -> None:
    _refuse(
        run.use_lora or run.lora is None or "use_lora" not in run.model_fields_set,
        f"use_lora = false with lora = {run.lora.model_dump(exclude_unset=True) if run.lora else None}",
        "contradict each other",
        "Leave out one of the two",
    )
    lora = run.lora
    if lora is None:
        return
    _refuse(lora.alpha != 0, "lora.alpha = 0", "multiplies all that the adapter learns by 0", "Use lora.alpha: 16")
    targets = lora.target_modules
    _refuse(
        targets is None or len(targets) > 0,
        f"lora.target_modules = {targets!r}",
        "names no module",
        "Name linear layers, such as [q_proj, v_proj], or leave it out for all of them",
    )
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            rule = f"is no regular expression ({error})"
            raise ConfigError(f"lora.target_modules = {targets!r}", rule, "Write a list: [q_proj, v_proj]") from None
    for key, names in (("target_modules", targets), ("modules_to_save", lora.modules_to_save)):
        empty = not isinstance(names, str) and "" in (names or ())
        _refuse(not empty, f"lora.{key} = {names!r}", "holds an empty name", "Name modules, such as [q_proj, v_proj]")


def _check_log(run: RunConfig) -> None:
    for name in tracker_names(run):
        near = nearest(name.lower(), TRACKERS)
        _refuse(
            name in TRACKERS,
            f"log.report_to = {name!r}",
            f"must be of {', '.join(TRACKERS)}, or none",
            f"Did you mean {near}?" if near else "",
        )
    steps = parse_steps(run.log.profile_steps, "log.profile_steps")
    if run.train.max_steps is not None:
        check_last_step(steps, run.train.max_steps, "log.profile_steps")


_CHECKS = (
    *(_check_available, _check_batch, _check_schedule, _check_tables, _check_length, _check_packing, _check_optimizer),
    *(_check_compile, _check_save, _check_data, _check_eval, _check_lora, _check_log),
)
