"""Exit codes, and where `halfstep` writes what."""
import subprocess
import unittest

from program import PROGRAM, run


class Usage(unittest.TestCase):
    def test_a_wrong_command_line_exits_2_and_says_on_stderr_what_is_wrong(self):
        for arguments, culprit, help in [((), "--version", "--help"), (("evn",), "evn", "--help"), (("env", "--jsn"), "--jsn", "env --help"),
                                         (("--json",), "--version", "--help"), (("--version", "env"), "env", "env --help")]:
            with self.subTest(arguments=arguments):
                done = run(*arguments)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(done.stdout, "")
                self.assertIn(culprit, done.stderr)
                self.assertIn(f"halfstep {help}", done.stderr)

    def test_help_exits_0_lists_the_commands_and_fits_80_columns(self):
        self.assertIn("env", run("--help").stdout)
        for arguments in (("--help",), *((name, "--help") for name in ("env", "train", "preset", "report", "compare"))):
            done = run(*arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertLessEqual(max(map(len, done.stdout.splitlines())), 80)

    def test_help_of_a_command_is_what_its_option_prints(self):
        for words in ((), ("train",), ("launch",), ("checkpoint", "verify")):
            asked, expected = run("help", *words), run(*words, "--help")
            self.assertEqual((asked.returncode, asked.stdout, asked.stderr), (0, expected.stdout, ""))
        self.assertIn("--restarts", run("help", "launch").stdout)
        unknown = run("help", "trian")
        self.assertEqual(unknown.returncode, 2)
        self.assertIn("Did you mean 'train'?", unknown.stderr)

    def test_output_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "env"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("written", done.stderr)


if __name__ == "__main__":
    unittest.main()
