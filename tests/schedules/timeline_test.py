"""Timelines: text to the letter, the trace's fields, a PNG that is one."""

import json
import os
import struct
import sys
from unittest import mock

from absl.testing import absltest

from tfscale.schedules import timeline
from tfscale.schedules.action import Action
from tfscale.schedules.named_schedules import gpipe
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.schedule import Schedule
from tfscale.schedules.simulate import Span
from tfscale.schedules.simulate import simulate

# A step as it might be measured: no round numbers, not from 0.
MEASURED = (
    Span(Action("F", 0, 0), 0, 7.5010, 7.5031),
    Span(Action("F", 1, 0), 1, 7.5035, 7.5052),
    Span(Action("B", 1, 0), 1, 7.5052, 7.5093),
    Span(Action("B", 0, 0), 0, 7.5097, 7.5140),
)


class AsTextTest(absltest.TestCase):
    def test_time_is_to_scale(self):
        spans = simulate(gpipe(2, 3), forward=1, backward=2).spans
        self.assertEqual(
            timeline.as_text({"gpipe": spans}, unit="forwards").splitlines(),
            [
                "gpipe: 12 forwards, idle 25.0 %",
                "  device 0  F0 F1 F2          B0--- B1--- B2---",
                "  device 1     F0 F1 F2 B0--- B1--- B2---",
            ],
        )

    def test_measured_spans_begin_at_zero(self):
        self.assertEqual(
            timeline.as_text({"measured": MEASURED}).splitlines(),
            [
                "measured: 0.013 s, idle 53.1 %",
                "  device 0  F0-            B0-----",
                "  device 1      F0 B0-----",
            ],
        )

    def test_two_timelines_have_one_scale(self):
        lines = timeline.as_text(
            {
                "predicted": simulate(gpipe(1, 1)).spans,
                "measured": simulate(gpipe(1, 1), forward=2.0).spans,
            }
        ).splitlines()
        self.assertEqual(
            lines,
            [
                "predicted: 3 s, idle 0.0 %",
                "  device 0  F0 B0---",
                "measured: 6 s, idle 0.0 %",
                "  device 0  F0--- B0---------",
            ],
        )

    def test_names_have_the_stage_where_devices_have_several(self):
        schedule = Schedule([["F0.0", "F1.0", "B1.0", "B0.0"]])
        self.assertIn(
            "F0.0 F1.0 B1.0----- B0.0-----",
            timeline.as_text({"looped": simulate(schedule).spans}),
        )

    def test_names_that_do_not_fit_are_only_their_kind(self):
        # Never F1 for F12.
        spans = simulate(one_f_one_b(2, 40)).spans
        text = timeline.as_text({"long": spans}, width=100)
        for line in text.splitlines():
            self.assertLessEqual(len(line), len("  device 0  ") + 101)
        self.assertNotIn("F1 ", text)

    def test_nothing_to_draw_is_refused(self):
        for draw in (timeline.as_text, timeline.as_chrome_trace):
            with self.assertRaisesRegex(ValueError, "none for 'measured'"):
                draw({"measured": []})
            with self.assertRaisesRegex(ValueError, "There must be a timeline"):
                draw({})


class AsChromeTraceTest(absltest.TestCase):
    def test_rows_are_named_and_actions_are_in_microseconds(self):
        trace = timeline.as_chrome_trace(
            {"predicted": simulate(gpipe(2, 1)).spans, "measured": MEASURED}
        )
        events = json.loads(json.dumps(trace))["traceEvents"]
        names = [
            (e["pid"], e["tid"], e["args"]["name"])
            for e in events
            if e["name"] in ("process_name", "thread_name")
        ]
        self.assertEqual(
            names,
            [
                (0, 0, "predicted"),
                (0, 0, "device 0"),
                (0, 1, "device 1"),
                (1, 0, "measured"),
                (1, 0, "device 0"),
                (1, 1, "device 1"),
            ],
        )
        (backward,) = [
            e for e in events if e["name"] == "B1.0" and e["pid"] == 1
        ]
        self.assertEqual(
            (backward["ph"], backward["tid"], backward["cat"]),
            ("X", 1, "backward"),
        )
        self.assertAlmostEqual(backward["ts"], 4200, delta=1e-3)
        self.assertAlmostEqual(backward["dur"], 4100, delta=1e-3)
        self.assertEqual(
            backward["args"],
            {"kind": "backward", "stage": 1, "microbatch": 0},
        )


class SavePngTest(absltest.TestCase):
    def test_two_timelines_make_a_picture(self):
        one = os.path.join(self.create_tempdir(), "one.png")
        two = os.path.join(self.create_tempdir(), "two.png")
        timeline.save_png({"measured": MEASURED}, one)
        timeline.save_png(
            {"predicted": simulate(gpipe(2, 1)).spans, "measured": MEASURED},
            two,
        )
        sizes = []
        for path in (one, two):
            with open(path, "rb") as file:
                head = file.read(24)
            self.assertEqual(head[:8], b"\x89PNG\r\n\x1a\n")
            sizes.append(struct.unpack(">II", head[16:]))
        self.assertEqual(sizes[0][0], sizes[1][0])
        self.assertGreater(sizes[1][1], sizes[0][1])

    def test_without_matplotlib_the_extra_is_named(self):
        with (
            mock.patch.dict(sys.modules, {"matplotlib.figure": None}),
            self.assertRaisesRegex(ImportError, r"tfscale\[plot\]"),
        ):
            timeline.save_png({"measured": MEASURED}, "unused.png")


if __name__ == "__main__":
    absltest.main()
