"""Train a decoder to translate, by default from German to English, and measure BLEU.

    python examples/train_translation.py --data phrases    # no download, minutes on two CPU cores
    python examples/train_translation.py --dtype bfloat16  # IWSLT14, which datasets downloads
    python examples/train_translation.py --data my_folder --preset large --dtype bfloat16
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256
    python examples/train_translation.py --resume workdir_vocab10000_lr0.001_embd256 --beams 4

A data folder has train, valid and test files with one sentence a line: train.de, train.en and so
on. After each epoch the run writes a checkpoint and eval_results_epoch{n}.json with loss, BLEU and
all translations. translate.py translates with the trained model. A finished run that is resumed
averages and translates again, as with other --beams.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad import backend
from tensorgrad.command import command
from tensorgrad.data.pair_loader import IGNORED, PairBatch
from tensorgrad.errors import DataError
from tensorgrad.files import finite, replacing
from tensorgrad.models.translation import generate
from tensorgrad.nn import evaluating
from tensorgrad.train import Outcome, Trainer, average_checkpoints, config
from tensorgrad.train.checkpoint import list_checkpoints, step_of
from tensorgrad.train.device import choose_device
from tensorgrad.train.folder import run_folder
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.run import report_stop, resume_run
from tensorgrad.train.translation import AVERAGED, TranslationRun, TranslationSettings
from tensorgrad.weights import save_arrays

log = logging.getLogger("train_translation")


class Bleu:
    """BLEU of detokenized text, computed by sacreBLEU.

    Raises:
        DataError: the sacrebleu package is missing.
    """

    def __init__(self, lowercase: bool) -> None:
        try:
            metrics = importlib.import_module("sacrebleu.metrics")
        except ImportError as error:
            raise DataError(
                "BLEU needs the sacrebleu package: pip install 'tensorgrad-cupy[text]'"
            ) from error
        self._metric = metrics.BLEU(lowercase=lowercase)

    def __call__(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        """Return BLEU, 0 to 100, and sacreBLEU's signature."""
        score = self._metric.corpus_score(list(texts), [list(references)])
        return {"bleu": score.score, "signature": str(self._metric.get_signature())}


class EvaluatedRun(TranslationRun):
    """A run with its trainer, which evaluates the model after each epoch."""

    def __init__(
        self, settings: TranslationSettings, folder: Path, device: str, resuming: bool
    ) -> None:
        self.bleu, loggers = Bleu(settings.lowercase), make_loggers(settings.loggers)
        super().__init__(settings, folder, device, resuming)
        # Checkpoints of interrupts are kept in addition: those to average must stay.
        more = len(self._checkpoints(regular=False))
        self.settings = replace(self.settings, keep=settings.keep + more)
        names = ("batch", "seed", "source", "target", "lowercase")
        self.trainer = Trainer(
            self.model,
            self.optimizer,
            self.loss,
            self.batches.iterate,
            self.settings.learning_rate,
            self.settings,
            folder,
            tokens_per_step=self.batches.tokens // self.batches.batches,
            evaluate=self.evaluate,
            callbacks=loggers,
            belongs_to={
                "model": asdict(self.model.config),
                "tokenizer": {"sha256": self.tokenizer.digest},
                "data": {
                    "corpus": self.corpus.digest,
                    **{name: getattr(settings, name) for name in names},
                },
            },
            scaler=settings.scaler(),
        )

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss, and BLEU on the test set every `bleu_every` epochs."""
        step, settings = self.trainer.step, self.settings
        measured = {"validation_loss": self.validation_loss(self.validation.evaluation_batches())}
        epoch = -(-step // self.batches.batches)
        if step and (epoch % settings.bleu_every == 0 or step == settings.steps):
            place, translated = {"epoch": epoch, "step": step}, self.translate(f"epoch {epoch}")
            results = {**place, **finite(measured), **translated}
            self.write(f"eval_results_epoch{epoch}.json", results)
            measured["bleu"] = results["bleu"]
        return measured

    def validation_loss(self, batches: Iterable[PairBatch]) -> float:
        """Return the mean negative log-likelihood of the target tokens, in nats."""
        total, count = np.zeros(()), 0
        with evaluating(self.model):
            for batch in batches:
                arrays = (backend.to_device(array, self.model.device) for array in batch)
                counted = int((batch[1] != IGNORED).sum())
                part = self.loss(*arrays).data.astype(np.float64) * counted
                total, count = (total + part if count else part), count + counted
        return float(total) / count

    def translate(self, desc: str) -> dict[str, Any]:
        """Translate the test set; return BLEU and all texts."""
        settings = self.settings
        keys = settings.source, settings.target
        pairs = self.corpus.test[: settings.test_limit]
        with self.precision():
            texts = generate(
                self.model,
                [dict(zip(keys, pair, strict=True)) for pair in pairs],
                *keys,
                self.tokenizer,
                settings.context,
                desc,
                beams=settings.beams,
                length_penalty=settings.length_penalty,
                rows=max(settings.rows, settings.beams),
            )
        score = self.bleu(texts, [reference for _, reference in pairs])
        entries = [
            {"source": source, "reference": reference, "translation": text}
            for (source, reference), text in zip(pairs, texts, strict=True)
        ]
        search: dict[str, Any] = {"beams": settings.beams}
        if settings.beams > 1:
            search["length_penalty"] = settings.length_penalty
        return {**score, **search, "translations": entries}

    def write(self, name: str, results: Mapping[str, Any]) -> None:
        """Write results as JSON into the folder of the run."""
        with replacing(self.folder / name) as file:
            file.write(json.dumps(results, indent=1, ensure_ascii=False).encode())

    def finish(self) -> None:
        """Average the last checkpoints, evaluate and save the averaged model."""
        last = self._checkpoints(regular=True)[: self.settings.average]
        arrays = average_checkpoints(last)
        save_arrays(self.folder / AVERAGED, arrays)
        self.model.load_state_dict(arrays)
        loss = self.validation_loss(self.validation.evaluation_batches())
        results = {**finite({"validation_loss": loss}), **self.translate("averaged")}
        self.write("eval_results_averaged.json", results)
        log.info(
            "mean of the last %d checkpoints: validation loss %.3f, BLEU %.2f",
            *(len(last), loss, results["bleu"]),
        )

    def _checkpoints(self, regular: bool) -> list[Path]:
        """Return the checkpoints that an uninterrupted run has too, or the others, newest first."""
        settings, found = self.settings, list_checkpoints(self.folder / "checkpoints")
        ends = {settings.steps, *range(0, settings.steps, settings.checkpoint_every)}
        return [path for path in found if (step_of(path) in ends) == regular]


def train(settings: TranslationSettings, folder: Path, resuming: bool, device: str) -> Outcome:
    """Train a translation model, from step 0 or from the newest checkpoint.

    A finished run that is resumed averages and translates again, as with other --beams.
    """
    began = time.perf_counter()
    with run_folder(folder):
        run = EvaluatedRun(settings, folder, device, resuming)
        batches = run.batches
        if resuming:
            resume_run(run.trainer)
        resumed = run.trainer.step
        config.save(settings, folder)
        run.tokenizer.save(folder / "tokenizer.json")
        log.info(
            "%s: %s parameters, vocabulary %s, %s pairs (%d cut, %d skipped), %d batches of %s "
            "tokens an epoch, on %s",
            *(folder, f"{run.model.config.parameters:,}", f"{run.tokenizer.vocab_size:,}"),
            *(f"{len(run.corpus.train):,}", batches.cut, batches.skipped, batches.batches),
            *(f"{batches.tokens // batches.batches:,}", device),
        )
        outcome = run.trainer.run()
        if not outcome.finished:
            report_stop(outcome, run.settings.steps, folder)
            return outcome
        if settings.average:
            run.finish()
        elif resumed == outcome.step:
            run.evaluate()
        log.info(
            "all in %s after %.0f s, %s tokens/s in training; to use it: "
            "python examples/translate.py %s",
            *(folder, time.perf_counter() - began, f"{outcome.tokens_per_second:,.0f}", folder),
        )
        return outcome


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    settings, folder, resuming = config.read_command_line(TranslationSettings, __doc__, arguments)
    settings, device = choose_device(settings)
    return train(settings, folder, resuming, device).status


if __name__ == "__main__":
    sys.exit(main())
