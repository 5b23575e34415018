"""Train with accelerate until rank 1 fails: lost.py raise|kill."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator
from failing import fail, reporting_errors


def main() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(6, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with reporting_errors(accelerator.process_index):
        for step in range(1000):
            if step == 3:
                fail(accelerator.process_index)
            accelerator.backward(model(torch.ones(3, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
