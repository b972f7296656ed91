"""Input pipelines that are in the right order, and resume exactly."""

from tfscale.data.array_source import arrays
from tfscale.data.csv_source import csv
from tfscale.data.explaining import explain
from tfscale.data.explanation import Explanation
from tfscale.data.file_source import files
from tfscale.data.image_source import image_folder
from tfscale.data.lints import Finding
from tfscale.data.lints import lint
from tfscale.data.make import pipeline
from tfscale.data.photo_source import photo_patches
from tfscale.data.pipeline_dataset import Pipeline
from tfscale.data.position import Position
from tfscale.data.position import PositionValue
from tfscale.data.stream_source import dataset
from tfscale.data.stream_source import tfds
from tfscale.data.text_source import text
from tfscale.data.text_source import tokens
from tfscale.data.tfrecord_source import tfrecords
from tfscale.data.throughput import Throughput
from tfscale.data.throughput import benchmark

__all__ = [
    "Explanation",
    "Finding",
    "Pipeline",
    "Position",
    "PositionValue",
    "Throughput",
    "arrays",
    "benchmark",
    "csv",
    "dataset",
    "explain",
    "files",
    "image_folder",
    "lint",
    "photo_patches",
    "pipeline",
    "text",
    "tfds",
    "tfrecords",
    "tokens",
]
