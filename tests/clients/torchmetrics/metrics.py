"""Metrics of torchmetrics, updated with uneven batches on every rank, computed from all of them."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from client_report import BACKEND, DEVICE, report
from torchmetrics import Metric, MetricCollection, aggregation, classification, regression, retrieval, wrappers

CLASSES = 4
MULTICLASS: dict[str, Any] = {"num_classes": CLASSES}

OF_CLASSES: list[Callable[[], Metric]] = [
    lambda: classification.MulticlassAccuracy(**MULTICLASS),
    lambda: classification.MulticlassAccuracy(**MULTICLASS, average="micro", top_k=2),
    lambda: classification.MulticlassPrecision(**MULTICLASS),
    lambda: classification.MulticlassRecall(**MULTICLASS),
    lambda: classification.MulticlassF1Score(**MULTICLASS),
    lambda: classification.MulticlassFBetaScore(2.0, **MULTICLASS),
    lambda: classification.MulticlassSpecificity(**MULTICLASS),
    lambda: classification.MulticlassConfusionMatrix(**MULTICLASS),
    lambda: classification.MulticlassCohenKappa(**MULTICLASS),
    lambda: classification.MulticlassJaccardIndex(**MULTICLASS),
    lambda: classification.MulticlassMatthewsCorrCoef(**MULTICLASS),
    lambda: classification.MulticlassStatScores(**MULTICLASS, average=None),
    lambda: classification.MulticlassAUROC(**MULTICLASS),
    lambda: classification.MulticlassAUROC(**MULTICLASS, thresholds=20),
    lambda: classification.MulticlassAveragePrecision(**MULTICLASS),
    lambda: classification.MulticlassROC(**MULTICLASS),
    lambda: classification.MulticlassCalibrationError(**MULTICLASS),
    lambda: classification.MulticlassHingeLoss(**MULTICLASS),
    lambda: classification.MulticlassExactMatch(**MULTICLASS, multidim_average="global"),
]
OF_NUMBERS: list[Callable[[], Metric]] = [
    regression.MeanSquaredError,
    regression.MeanAbsoluteError,
    regression.MeanAbsolutePercentageError,
    regression.R2Score,
    regression.PearsonCorrCoef,
    regression.SpearmanCorrCoef,
    regression.ConcordanceCorrCoef,
    regression.ExplainedVariance,
    regression.LogCoshError,
    lambda: regression.MinkowskiDistance(3.0),
    regression.KendallRankCorrCoef,
]
AGGREGATIONS: list[Callable[[], Metric]] = [
    aggregation.MeanMetric,
    aggregation.SumMetric,
    aggregation.MaxMetric,
    aggregation.MinMetric,
    aggregation.CatMetric,
]
RETRIEVALS: list[Callable[[], Metric]] = [retrieval.RetrievalMAP, retrieval.RetrievalMRR, retrieval.RetrievalPrecision]


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores of classes, and the classes, of another number of samples on each rank and in each batch."""
    random = torch.Generator().manual_seed(100 + rank)
    counts = [5 + 3 * rank, 8, 2 + rank]
    return [
        (torch.randn(count, CLASSES, generator=random).softmax(-1), torch.randint(CLASSES, (count,), generator=random))
        for count in counts
    ]


def use_collections(rank: int, given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Report metrics that hold other metrics."""
    collection = MetricCollection(
        {
            "accuracy": OF_CLASSES[0](),
            "precision": OF_CLASSES[2](),
            "recall": OF_CLASSES[3](),
            "auroc": OF_CLASSES[12](),
        }
    )
    for scores, classes in given:
        collection.update(scores, classes)
    report(rank, "collection", collection.compute())
    report(rank, "compute groups", [list(group) for group in collection.compute_groups.values()])
    tracker = wrappers.MetricTracker(OF_CLASSES[0]())
    for scores, classes in given:
        tracker.increment()
        tracker.update(scores, classes)
    report(rank, "tracker", tracker.compute_all())
    per_class = wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(**MULTICLASS, average=None))
    per_class.update(*given[0])
    report(rank, "classwise", per_class.compute())
    extremes = wrappers.MinMaxMetric(OF_CLASSES[0]())
    extremes.update(*given[0])
    report(rank, "extremes", extremes.compute())


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    given = [(scores.to(DEVICE), classes.to(DEVICE)) for scores, classes in batches(rank)]
    torch.set_default_device(DEVICE)
    for number, make in enumerate(OF_CLASSES):
        metric = make()
        for scores, classes in given:
            exact = isinstance(metric, classification.MulticlassExactMatch)
            metric.update(*((scores.argmax(-1)[:, None], classes[:, None]) if exact else (scores, classes)))
        report(rank, f"{number} {type(metric).__name__}", metric.compute())
    for make in OF_NUMBERS:
        metric = make()
        for scores, classes in given:
            metric.update(scores[:, 0].contiguous(), classes / 4 + scores[:, 0])
        report(rank, type(metric).__name__, metric.compute())
    for make in AGGREGATIONS:
        metric = make()
        for scores, _ in given:
            metric.update(scores[:, 1])
        report(rank, type(metric).__name__, metric.compute())
    for make in RETRIEVALS:
        metric = make()
        for scores, classes in given:
            metric.update(scores[:, 2].contiguous(), classes > 1, indexes=classes % 2)
        report(rank, type(metric).__name__, metric.compute())

    use_collections(rank, given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
