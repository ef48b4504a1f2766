"""What a run leaves for people to read: tables, pictures, predictions and the model card."""

from accumft.report.card import model_card
from accumft.report.plots import plot_confusion_matrix, plot_per_label, plot_regression, plot_training
from accumft.report.predictions import write_predictions
from accumft.report.text import metrics_table

__all__ = [
    "metrics_table",
    "model_card",
    "plot_confusion_matrix",
    "plot_per_label",
    "plot_regression",
    "plot_training",
    "write_predictions",
]
