"""Train with transformers' Trainer until rank 1 fails: lost.py raise|kill."""

from typing import Any

from failing import fail, reporting_errors
from trainer import make_trainer
from transformers import TrainerCallback


class Failing(TrainerCallback):
    """Fails in the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2:
            fail(args.process_index)


def main() -> None:
    trainer = make_trainer()
    trainer.add_callback(Failing())
    with reporting_errors(trainer.args.process_index):
        trainer.train()


if __name__ == "__main__":
    main()
