"""Input pipelines that are in the right order, and resume exactly."""

from tfscale.data.explaining.explain import explain
from tfscale.data.explaining.explanation import Explanation
from tfscale.data.explaining.lints import Finding
from tfscale.data.explaining.lints import lint
from tfscale.data.explaining.throughput import Throughput
from tfscale.data.explaining.throughput import benchmark
from tfscale.data.make import pipeline
from tfscale.data.random_crop import decode_random_crop
from tfscale.data.sources.array_source import arrays
from tfscale.data.sources.csv_source import csv
from tfscale.data.sources.fetched_source import array_records
from tfscale.data.sources.file_source import files
from tfscale.data.sources.hugging_face_source import hugging_face
from tfscale.data.sources.image_source import image_folder
from tfscale.data.sources.json_source import json_lines
from tfscale.data.sources.mix_source import mix
from tfscale.data.sources.pack_source import pack
from tfscale.data.sources.pack_source import packed_attention_mask
from tfscale.data.sources.parquet_source import parquet
from tfscale.data.sources.stream_source import dataset
from tfscale.data.sources.stream_source import tfds
from tfscale.data.sources.tar_source import webdataset
from tfscale.data.sources.text_source import text
from tfscale.data.sources.text_source import tokens
from tfscale.data.sources.tfrecord_source import tfrecords

__all__ = [
    "Explanation",
    "Finding",
    "Throughput",
    "array_records",
    "arrays",
    "benchmark",
    "csv",
    "dataset",
    "decode_random_crop",
    "explain",
    "files",
    "hugging_face",
    "image_folder",
    "json_lines",
    "lint",
    "mix",
    "pack",
    "packed_attention_mask",
    "parquet",
    "pipeline",
    "text",
    "tfds",
    "tfrecords",
    "tokens",
    "webdataset",
]
