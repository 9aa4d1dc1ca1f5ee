"""`halfstep forecast`: against runs of this machine, and what it says to people."""
import json
import pathlib
import tempfile
import unittest
import xml.etree.ElementTree

from program import CORPUS, ask, run

CONFIG = """
[model]
kind = "{kind}"
layers = 3
width = 128
heads = 4
vocabulary = 2048
[data]
train = ["{corpus}"]
validation_fraction = 0.1
sequence_length = 64
batch_size = 16
[precision]
compute = "bf16"
"""


def chosen(answer):
    return answer["forecast"][0]["cheapest"]


class Forecast(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_file(self, kind):
        corpus, config = self.folder / "corpus.txt", self.folder / "run.toml"
        corpus.write_text(CORPUS * 4)
        config.write_text(CONFIG.format(kind=kind, corpus=corpus))
        return str(config)

    def test_a_run_has_the_parameters_and_the_memory_of_its_forecast(self):
        for kind in ("gpt2", "llama"):
            with self.subTest(kind=kind):
                config = self.run_file(kind)
                tried = ask("train", config, "--dry-run")
                forecast = ask("forecast", config, "--device", "cpu")
                self.assertEqual(forecast["parameters"], tried["parameters"])
                ratio = chosen(forecast)["bytes_at_peak"]["total"] / tried["peak_bytes"]
                self.assertLess(abs(ratio - 1), 0.05, (forecast, tried))

    def test_a_folder_and_a_known_name_are_models(self):
        (self.folder / "config.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "tie_word_embeddings": True}))
        self.assertEqual(ask("forecast", str(self.folder))["parameters"], 134515008)
        self.assertEqual(ask("forecast", "llama-405b", "--ranks", "512")["parameters"], 405853388800)

    def test_each_number_of_ranks_has_a_row_and_the_cheapest_fits(self):
        answer = ask("forecast", "llama-8b", "--ranks", "8,64,1024")
        self.assertEqual([row["ranks"] for row in answer["forecast"]], [8, 64, 1024])
        for row in answer["forecast"]:
            self.assertEqual([each["shard"] for each in row["shardings"]], ["none", "states", "gradients", "weights"])
            best = row["cheapest"]
            self.assertLessEqual(best["bytes_at_peak"]["total"], answer["usable_bytes"])
            quickest = max(each["tokens_per_second_per_device"] for each in row["shardings"] if each["fits"])
            self.assertGreaterEqual(best["tokens_per_second_per_device"], quickest / 1.001)
            parts = sum(best[part] for part in ("forward_seconds", "backward_seconds", "update_seconds", "exposed_seconds"))
            self.assertAlmostEqual(best["seconds_per_step"], parts)

    def test_the_plain_forms_fit_80_columns_and_name_their_sources(self):
        for arguments in (("llama-8b", "--ranks", "64"), ("llama-70b", "--ranks", "8,512,16384", "--precision", "fp8-current"),
                          ("llama-405b",), ("--help",)):
            done = run("forecast", *arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertLessEqual(max(map(len, done.stdout.splitlines())), 80, done.stdout)
            if arguments[0] != "--help":
                self.assertIn("assumed", done.stdout)

    def test_a_plot_is_svg_with_a_line_for_each_sharding_that_fits(self):
        picture = self.folder / "ranks.svg"
        self.assertEqual(run("forecast", "gpt2-124m", "--ranks", "1,8,64", "--plot", str(picture)).returncode, 0)
        root = xml.etree.ElementTree.parse(picture).getroot()
        lines = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("class") == "line"]
        self.assertEqual(len(lines), 2 * 2 * 4)  # two panels; four shardings, each in its panel and in the legend

    def test_a_calibrated_machine_is_a_device(self):
        device = self.folder / "machine.json"
        self.assertEqual(run("bench", "--calibrate", str(device)).returncode, 0)
        answer = ask("forecast", "gpt2-124m", "--device", str(device), "--sequence-length", "128", "--micro-batch", "1")
        self.assertEqual(answer["device"], json.loads(device.read_text()))
        self.assertGreater(chosen(answer)["seconds_per_step"], 0.01)

    def test_what_cannot_be_is_refused_with_what_there_is(self):
        for arguments, words in [(("llama-9b",), "llama-8b"), (("llama-8b", "--device", "z80"), "h100"),
                                 (("llama-8b", "--device", "a100", "--precision", "mxfp8"), "no fp8"),
                                 (("llama-8b", "--precision", "bf61"), "bf16"),
                                 (("llama-8b", "--ranks", "8", "--batch", "12"), "8 ranks"),
                                 (("llama-8b", "--plot", "x.svg"), "--ranks"),
                                 (("resnet18-fashion",), "language model")]:
            with self.subTest(arguments=arguments):
                done = run("forecast", *arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main()
