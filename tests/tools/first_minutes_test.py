"""tools/first_minutes runs what our pages show, and notices each kind of broken promise."""
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "first_minutes"


def be_in_the_background():
    """A shell without job control ignores Ctrl-C for what it starts there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def page(title, *lines):
    section = "\n".join([f"## {title}", "", "So:", "", "```sh", *lines, "```"])
    return f"# It\n\n{section}\n\n## Later\n\n```sh\nfalse\n```\n"


def carry_out(*lines, options=("README.md",), contributing=("true",), packages=()):
    """Exit code and answer for a clone whose README has these lines, and its .venv these packages."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "README.md").write_text(page("First three minutes", *lines))
        pathlib.Path(folder, "CONTRIBUTING.md").write_text(page("Build from source", *contributing))
        for package in packages:
            pathlib.Path(folder, ".venv/lib/python3.11/site-packages", package).mkdir(parents=True)
        command = [sys.executable, TOOL, "--json", "--in", folder, *options]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=be_in_the_background)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


class FirstMinutes(unittest.TestCase):
    def assert_broken(self, word, *lines):
        code, answer = carry_out(*lines)
        self.assertEqual(code, 1, answer)
        self.assertIn(word, answer["commands"][-1]["broken"][0])

    def test_commands_share_a_shell_and_keep_their_promises(self):
        code, answer = carry_out("mkdir there && cd there", "export NAME=a", 'echo "$NAME" \\',
                                 "  > file  # makes there/file; for people", "grep -q a file  # under 1 minute")
        self.assertEqual(code, 0, answer)
        self.assertEqual(len(answer["commands"]), 4)

    def test_another_preset_takes_the_place_of_the_users(self):
        code, answer = carry_out("echo --preset user build/user users > told", "cat told",
                                 options=["README.md", "--built-as", "dev"])
        self.assertEqual((code, answer["commands"][1]["output"][0]), (0, "--preset dev build/dev users"))

    def test_packages_of_the_clone_are_there_for_a_preset_that_is_built(self):
        asks = 'python3 -c "import package_of_venv"'
        self.assertEqual(carry_out(asks, options=["--built-as", "dev"], packages=["package_of_venv"])[0], 0)
        self.assertEqual(carry_out(asks, packages=["package_of_venv"])[0], 1)

    def test_pages_run_in_their_order_each_in_a_shell_of_its_own(self):
        code, answer = carry_out('test -f made && test -z "$NAME"', contributing=["touch made", "export NAME=a"], options=[])
        self.assertEqual((code, len(answer["commands"])), (0, 3), answer)
        code, answer = carry_out("true", contributing=["false"], options=[])
        self.assertEqual((code, len(answer["commands"])), (1, 1), answer)

    def test_it_stops_where_it_is_asked_to(self):
        code, answer = carry_out("true", "echo here it is", "false", options=["README.md", "--until", "echo here"])
        self.assertEqual((code, len(answer["commands"])), (0, 2), answer)
        self.assertEqual(carry_out("true", options=["README.md", "--until", "echo"])[0], 1)

    def test_an_unknown_page_is_refused(self):
        self.assertEqual(carry_out("true", options=["docs/memory.md"])[0], 2)

    def test_a_command_that_fails_ends_it(self):
        code, answer = carry_out("true", "false", "touch never")
        self.assertEqual((code, len(answer["commands"])), (1, 2))

    def test_the_shells_own_exit_is_a_failure(self):
        self.assert_broken("exited with 3", "exit 3")

    def test_a_file_that_was_not_made_is_noticed(self):
        self.assert_broken("did not make", "true  # makes nothing.txt")

    def test_a_comment_below_a_command_promises_too(self):
        self.assert_broken("did not make there.txt", "true  # for people", "# under 1 minute; makes there.txt")
        self.assert_broken("did not make there.txt", "true", "# for people", "# makes there.txt", "false")

    def test_a_file_that_was_there_before_is_noticed(self):
        self.assert_broken("was there before", "touch README.md  # makes README.md")

    def test_taking_too_long_is_noticed(self):
        self.assert_broken("promised under", "sleep 0.2  # under 0 minutes")

    def test_ctrl_c_is_pressed_and_its_exit_code_asked_for(self):
        interrupted = ("python3 -c 'import signal, sys, time; "
                       "signal.signal(signal.SIGINT, lambda *_: sys.exit({})); "
                       "print(\"step 9/20\", \"step 12/20\", sep=chr(10), flush=True); time.sleep(60)'")
        self.assertEqual(carry_out(interrupted.format(130) + "  # press Ctrl-C at step 10")[0], 0)
        self.assert_broken("exited with 0, expected 130", interrupted.format(0) + "  # press Ctrl-C at step 10")
        self.assert_broken("exited with 0, expected 130", "echo step 9/10  # press Ctrl-C at step 10")

    def test_what_is_marked_is_listed_and_not_run(self):
        code, answer = carry_out("true", "false  # not in CI: it fails")
        self.assertEqual((code, answer["skipped"]), (0, [{"command": "false", "why": "it fails"}]))
        self.assertEqual(carry_out("true", "false  # not in CI: it fails", options=["README.md", "--all"])[0], 1)

    def test_the_environment_is_clean(self):
        code, answer = carry_out('test -z "$HALFSTEP_PROGRAM$VIRTUAL_ENV"', 'test -z "$(ls -A ~)"')
        self.assertEqual(code, 0, answer)

    def test_a_readme_without_the_section_is_refused(self):
        code, said = carry_out("# nothing")
        self.assertEqual(code, 1)
        self.assertIn("no commands", said)


if __name__ == "__main__":
    unittest.main()
