"""All splits of an entity recognition: read, brought to IOB2, held out, drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accumft.data.draw import draw_rows, hold_out
from accumft.data.files import checked_path, is_saved_dataset
from accumft.data.splits import read_splits
from accumft.data.tags import OUTSIDE, SCHEME_NAMES, Scheme, Sentence, to_iob2, types_of
from accumft.data.token_files import read_sentences, sentences_of_table
from accumft.errors import UserError

SPLITS = ("train", "validation", "test")
_DEFAULT_SPLIT = 0.1


@dataclass(frozen=True)
class TokenData:
    """The sentences of a run, all in IOB2."""

    splits: dict[str, list[Sentence]]
    """By "train", and "validation" and "test" where there are such."""
    types: list[str]
    """The entity types of the training data, sorted."""
    scheme: Scheme
    """That the sentences came in."""
    notes: list[str]
    """Remarks of one line each, to be printed before training."""

    @property
    def labels(self) -> list[str]:
        """The tags by id: O, then B and I of each type."""
        return [OUTSIDE, *(f"{letter}-{kind}" for kind in self.types for letter in "BI")]

    @property
    def id2label(self) -> dict[int, str]:
        """The same as `transformers` wants them."""
        return dict(enumerate(self.labels))


def read_token_splits(recipe: Any, notes: list[str]) -> dict[str, list[Sentence]]:
    """The sentences that a recipe names, by split, with their tags as they are written; see `read_sentences`."""
    tables: Mapping[str, Any] = {}
    if recipe.dataset_name is not None:
        tables = read_splits(recipe)
    elif is_saved_dataset(checked_path(recipe.train_file)):
        tables = read_splits(replace(recipe, validation_file=None, test_file=None))
    whole = recipe.dataset_name or recipe.train_file
    found = {split: sentences_of_table(table, f"{whole} ({split})", recipe, notes) for split, table in tables.items()}
    for split in SPLITS:
        path = getattr(recipe, f"{split}_file")
        if path is not None and not (tables and split == "train"):
            if not path.strip():
                raise UserError(f"--{split}_file {path!r}: names no file; name one, or leave out the flag")
            found[split] = read_sentences(path, recipe, notes)
    return found


def load_token_data(splits: Mapping[str, Sequence[Sentence]], recipe: Any, notes: list[str]) -> TokenData:
    """The sentences of a run → its data.

    Without validation data, a share of the training sentences is held out; equal ones stay on one side.

    Args:
        splits: as of `read_token_splits`; "train" is needed.
        recipe: its tag_scheme, on_bad_tags, validation_split, max_train_samples, max_eval_samples and seed.
        notes: what was remarked while reading.

    Raises:
        UserError: tags that cannot be read, no entity in training, a type that training does not have, or a share to
            hold out that comes to nothing.
    """
    names = [name for name in SPLITS if name in splits]
    every = [sentence for name in names for sentence in splits[name]]
    converted, scheme = to_iob2(every, recipe.tag_scheme, recipe.on_bad_tags, notes)
    notes.append(f"tags: {SCHEME_NAMES[scheme]}" + ("" if scheme == "iob2" else ", trained and scored as IOB2"))
    data: dict[str, list[Sentence]] = {}
    for name in names:
        data[name], converted = converted[: len(splits[name])], converted[len(splits[name]) :]
    types = types_of(data["train"])
    if not types:
        raise UserError(f"{data['train'][0].source}: has no entity, every tag is O; is --label_column right?")
    _check_types(data, types)
    _note_repeated(data, notes)
    _hold_out(data, recipe, notes)
    for name, sentences in list(data.items()):
        size = recipe.max_train_samples if name == "train" else recipe.max_eval_samples
        drawn = draw_rows(len(sentences), size, recipe.seed, stream=SPLITS.index(name) + 1)
        if len(drawn) < len(sentences):
            notes.append(f"{name}: {len(drawn)} of {len(sentences)} sentences are drawn")
            data[name] = [sentences[i] for i in drawn]
    return TokenData({name: data[name] for name in SPLITS if name in data}, types, scheme, notes)


def _check_types(data: Mapping[str, Sequence[Sentence]], types: Sequence[str]) -> None:
    known = set(types)
    for name in ("validation", "test"):
        for sentence in data.get(name, ()):
            for word, tag in enumerate(sentence.tags):
                if tag != OUTSIDE and tag[2:] not in known:
                    raise UserError(
                        f"{sentence.place(word)}: {tag[2:]!r} is no entity type of the training data "
                        f"({', '.join(types[:20])}); correct it, or add such sentences there"
                    )


def _note_repeated(data: Mapping[str, Sequence[Sentence]], notes: list[str]) -> None:
    train = {tuple(sentence.words) for sentence in data["train"]}
    for name in ("validation", "test"):
        again = sum(tuple(sentence.words) in train for sentence in data.get(name, ()))
        if again:
            notes.append(f"{name}: {again} of {len(data[name])} sentences are also in the training data")


def _hold_out(data: dict[str, list[Sentence]], recipe: Any, notes: list[str]) -> None:
    """Takes validation sentences out of the training ones, in place, where there are none."""
    fraction = recipe.validation_split
    if "validation" in data:
        if fraction:
            raise UserError(f"--validation_split {fraction}: there is validation data already; leave out one of them")
        return
    if fraction == 0:
        return
    train = data["train"]
    texts = [tuple(sentence.words) for sentence in train]
    has_entity = np.array([any(tag != OUTSIDE for tag in sentence.tags) for sentence in train], np.int64)
    share = _DEFAULT_SPLIT if fraction is None else fraction
    documents = [sentence.source for sentence in train]
    # Sentences of a document are alike: where there are several documents, whole ones are held out, if one fits.
    held_out = hold_out(documents if len(set(documents)) > 1 else texts, has_entity, share, recipe.seed)
    if not held_out.any():
        held_out = hold_out(texts, has_entity, share, recipe.seed)
    rows = int(held_out.sum())
    notes.append(
        f"{recipe.train_file or train[0].source}: {rows} of {len(train)} sentences are held out for validation"
    )
    if not rows:
        if fraction is not None:
            raise UserError(f"--validation_split {fraction}: of the {len(train)} sentences that is none")
        notes[-1] += ", so there is no evaluation and the last model is kept: too few, or too many of one text"
        return
    data["train"] = [sentence for sentence, out in zip(train, held_out, strict=True) if not out]
    data["validation"] = [sentence for sentence, out in zip(train, held_out, strict=True) if out]
