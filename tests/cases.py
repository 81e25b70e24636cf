"""Public bug reports as numbers: the input, the right output, wrong ones.

Each entry names its reports. `expect` comes from a float64 computation apart
from this library; `wrong` and `never` are outputs of known faults; `reject`
says why the input must be refused.
"""

# fmt: off

from math import inf
from math import nan

RAMPS = [
  [0.05 * i for i in range(128)],
  [0.03 * (7 * i % 128) for i in range(128)],
]

# Logits, labels and weights of one row (or of a batch).
WEIGHTED_CROSS_ENTROPY = {
  "WCE-01": {
    "source": "NVIDIA-NeMo/Automodel#3796, pytorch/pytorch#116349",
    "logits": [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]],
    "labels": [0, 1],
    "weights": [0.0, 0.0],
    "expect": {"sum": 0.0,
               "denom": 0.0,
               "mean": 0.0,
               "grad_mean": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]},
    "wrong": [["zero over zero", "mean", nan]],
  },
  "WCE-02": {
    "source": "google/tunix#1891, ecmwf/WeatherGenerator#2717",
    "logits": [[0.5, -1.0, 2.0], [nan, inf, -inf]],
    "labels": [2, -100],
    "weights": [1.0, 0.0],
    "expect": {"sum": 0.2413112967,
               "denom": 1.0,
               "mean": 0.2413112967,
               "grad_mean": [[0.1752903921, 0.03911257327, -0.2144029654],
                             [0.0, 0.0, 0.0]]},
    "wrong": [["multiply by mask", "mean", nan]],
  },
  "WCE-03": {
    "source": "google/tunix#1833",
    "logits": [[2.0, 0.0, -1.0], [0.3, 0.1, 0.0]],
    "labels": [0, 2],
    "weights": [0.25, 0.125],
    "expect": {"sum": 0.1974403875,
               "denom": 0.375,
               "mean": 0.5265077,
               "grad_mean": [[-0.1041368437, 0.07613013292, 0.02800671076],
                             [0.1302312778, 0.1066243521, -0.2368556299]]},
    "wrong": [["denominator clamped to 1", "mean", 0.1974403875]],
  },
  "WCE-04": {
    "source": "AI-Hypercomputer/maxtext#5060",
    "logits": [[1.0, 0.0], [0.0, 2.0]],
    "labels": [0, 0],
    "weights": [1e-06, 3e-06],
    "expect": {"sum": 6.694045721e-06,
               "denom": 4e-06,
               "mean": 1.67351143,
               "grad_mean": [[-0.06723535534, 0.06723535534],
                             [-0.6605978085, 0.6605978085]]},
    "wrong": [["eps 1e-8 added", "mean", 1.669338085],
              ["eps 1e-6 added", "mean", 1.338809144]],
  },
  "WCE-04b": {
    "source": "AI-Hypercomputer/maxtext#5060",
    "logits": [[-1.2, -1.99, -0.37], [0.63, 1.7, 0.16]],
    "labels": [2, 1],
    "weights": [2e-09, 1e-09],
    "expect": {"sum": 1.425009425e-09,
               "denom": 3e-09,
               "mean": 0.4750031417,
               "grad_mean": [[0.177912349, 0.08074459361, -0.2586569426],
                             [0.07341526558, -0.1192999731, 0.04588470751]]},
    "wrong": [["eps 1e-8 added", "mean", 0.1096161096]],
  },
  "WCE-05": {
    "source": "google-deepmind/optax#1185, jax-ml/jax#3774",
    "logits": [[0.0, 1.0, 2.0]],
    "labels": [3],
    "weights": [1.0],
    "reject": "label-out-of-range",
    "never": [["clamped to last id", 0.4076059644],
              ["one-hot row of zeros", 0.0]],
  },
  "WCE-06": {
    "source": "jax-ml/jax#4795, mathiaszinnen/focal_loss_torch#16",
    "logits": RAMPS,
    "labels": [-100, 5],
    "weights": [1.0, 1.0],
    "reject": "label-out-of-range",
    "never": [["wrapped to id 28", 7.114378807],
              ["one-hot zeros", 3.129896222]],
  },
  "WCE-07": {
    "source": "google-deepmind/optax#1185",
    "logits": RAMPS,
    "labels": [-100, 5],
    "weights": [0.0, 1.0],
    "expect": {"sum": 6.259792445, "denom": 1.0, "mean": 6.259792445},
    "wrong": [["NaN times 0", "mean", nan],
              ["ignored token kept in denominator", "mean", 3.129896222]],
  },
  "WCE-08": {
    "source": "pytorch/pytorch#53030",
    "logits": [[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]],
               [[0.0, 0.0], [1.0, 1.0], [0.0, 3.0]]],
    "labels": [[0, 0, 0], [1, 0, 1]],
    "weights": [[1.0], [0.5]],
    "reject": "weights-shape",
    "never": [["denominator not broadcast", 1.647261495]],
    "on_request": {"sum": 2.470892242, "denom": 4.5, "mean": 0.549087165},
  },
  "WCE-09": {
    "source": "pytorch/pytorch#16045, IntelLabs/matsciml#347",
    "logits": [[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.0]]],
    "labels": [[0, 0], [0, 1]],
    "weights": [1.0, 3.0],
    "reject": "weights-shape",
    "never": [["aligned with length", 0.8074270378],
              ["same, raw denominator", 1.614854076]],
  },
  "WCE-10": {
    "source": "pytorch/pytorch#139999, numpy/numpy#25548",
    "logits": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "labels": [0, 0, 0],
    "weights": [1.0, 1.0, 0.0],
    "weights_dtype": "bool",
    "expect": {"sum": 2.102889428,
               "denom": 2.0,
               "mean": 1.051444714,
               "grad_mean": [[-0.2119415576, 0.1059707788, 0.1059707788],
                             [-0.3940292212, 0.2880584424, 0.1059707788],
                             [0.0, 0.0, 0.0]]},
    "wrong": [["bool sum is 1", "mean", 2.102889428]],
  },
  "WCE-11": {
    "source": "pytorch/executorch#20089, pytorch/torchtitan#2336",
    "logits": [[1.0, 0.0]],
    "labels": [0],
    "weights": [1.0],
    "weights_dtype": "bfloat16",
    "repeat": 300,
    "expect": {"sum": 93.97850626, "denom": 300.0, "mean": 0.3132616875},
    "wrong": [["bf16 running count", "denom", 256.0],
              ["bf16 running count", "mean", 0.3671035401]],
  },
  "WCE-11b": {
    "source": "pytorch/executorch#20089, pytorch/torchtitan#2336",
    "logits": [[0.0, 0.25, -1.0]],
    "labels": [2],
    "weights": [0.5],
    "weights_dtype": "bfloat16",
    "repeat": 600,
    "expect": {"sum": 592.5834588, "denom": 300.0, "mean": 1.975278196},
    "wrong": [["bf16 running count", "denom", 128.0],
              ["bf16 running count", "mean", 4.629558272]],
  },
  "WCE-12": {
    "source": "automl/Auto-PyTorch#263, holgerroth/3Dunet_abdomen_cascade#3",
    "logits": [[1.0, 0.0], [0.0, 2.0]],
    "labels": [0, 0],
    "weights": [1.0, -1.0],
    "reject": "weights-negative",
    "never": [["zero-safe division of a cancelled denominator", 0.0]],
  },
  "WCE-13": {
    "source": "sb-ai-lab/RePlay#91, keras-team/keras#13329",
    "logits": [[0.0, 0.8], [1.5, -1.0]],
    "labels": [0, 1],
    "weights": [0.2, 7.0],
    "expect": {"sum": 18.28644827,
               "denom": 7.2,
               "mean": 2.539784482,
               "grad_mean": [[-0.01916595781, 0.01916595781],
                             [0.8984712139, -0.8984712139]]},
    "wrong": [["mean over items", "mean", 9.143224137]],
  },
  "WCE-15": {
    "source": "google-deepmind/optax#896",
    "logits": [[-inf, 1.0, 2.0]],
    "labels": [1],
    "weights": [1.0],
    "expect": {"sum": 1.313261688,
               "denom": 1.0,
               "mean": 1.313261688,
               "grad_mean": [[0.0, -0.7310585786, 0.7310585786]]},
    "wrong": [["0 times -inf", "mean", nan]],
  },
  "VOC-05": {
    "source": "google-deepmind/optax#1020, marin-community/marin#8217",
    "logits": [[0.5, 0.25, 0.125, 0.0]],
    "labels": [0],
    "weights": [1.0],
    "logits_dtype": "bfloat16",
    "expect": {"sum": 1.122530853,
               "denom": 1.0,
               "mean": 1.122530853,
               "grad_mean": [[-0.6745449274, 0.2534646654, 0.2236817821,
                              0.1973984799]]},
    "wrong": [["loss rounded to bf16", "mean", 1.125]],
    "tolerance": 1e-06,
  },
}

# Logits before a soft cap, of ids that a wider kernel is padded from.
SOFT_CAPPED = {
  "VOC-01": {
    "source": "unslothai/unsloth#10616",
    "logits": [[1.0, 0.0, -2.0, 0.5, 3.0]],
    "labels": [4],
    "weights": [1.0],
    "cap": 2.0,
    "padded_to": 8,
    "expect": {"sum": 0.6305070693,
               "denom": 1.0,
               "mean": 0.6305070693,
               "grad_mean": [[0.1725965868, 0.08709083918, 0.007974123443,
                              0.133610576, -0.08451255408]],
               "physical_width": 8},
    "wrong": [["padding capped to -cap", "mean", 0.6652556726]],
  },
}

# A row and the length of a chunk of it.
CHUNKED = {
  "VOC-02": {
    "source": "NVIDIA-NeMo/Automodel#3803",
    "logits": [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0], [1.0, 3.0]],
    "labels": [0, 0, 0, 1, 1],
    "weights": [1.0, 0.0, 1.0, 1.0, 0.5],
    "chunk": 2,
    "expect": {"sum": 1.196800885,
               "denom": 3.5,
               "mean": 0.3419431099,
               "grad_mean": [[-0.07684040611, 0.07684040611],
                             [0.0, 0.0],
                             [-0.03405797772, 0.03405797772],
                             [0.1428571429, -0.1428571429],
                             [0.01702898886, -0.01702898886]],
               "n_chunks": 3},
    "wrong": [["sum of chunk means", "mean", 0.8502272944],
              ["mean of chunk means", "mean", 0.2834090981]],
  },
}

# Hidden states and the rows of a head, one an id.
LINEAR = {
  "VOC-03": {
    "source": "linkedin/Liger-Kernel#1298",
    "hidden": [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]],
    "head": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]],
    "labels": [0, 3, 1],
    "weights": [1.0, 0.25, 2.0],
    "expect": {"sum": 6.406801431,
               "denom": 3.25,
               "mean": 1.971323517,
               "grad_hidden": [[-0.07848984089, 0.1681381856],
                               [0.1050407146, 0.05623527528],
                               [0.4629023887, -0.4263939845]],
               "grad_head": [[0.1907931309, -0.3652226748],
                             [-0.5193378839, 0.5926748441],
                             [0.2610820849, -0.1100455843],
                             [0.06746266802, -0.117406585]],
               "grad_head_abs": 2.224025456},
    "wrong": [["weight of first token for all", "grad_head_abs",
               1.350394748]],
  },
}

# Logits on two shards of the vocabulary, the second one narrower.
SHARDED_VOCABULARY = {
  "VOC-04": {
    "source": "apple/ml-cross-entropy#59, linkedin/Liger-Kernel#1260",
    "shards": [[[1.0, 0.0, 2.0]], [[0.5, -1.0, 0.0]]],
    "real_width": [3, 2],
    "labels": [3],
    "weights": [1.0],
    "expect": {"sum": 2.07443794,
               "denom": 1.0,
               "mean": 2.07443794,
               "grad_mean": [[0.2071239361, 0.07619663788, 0.5630212318,
                              -0.8743729823, 0.02803117656]]},
    "wrong": [["padding column counted", "mean", 2.147871134]],
  },
}

# Probabilities of one row, how many ids the teacher lists, and the divergence
# of the whole row.
TOP_K = {
  "KL-10": {
    "source": "verl-project/verl#7856",
    "teacher_probs": [0.5, 0.2, 0.2, 0.1],
    "student_probs": [0.9, 0.05, 0.03, 0.02],
    "k": 1,
    "expect": {"sum": 0.5108256238, "full": 0.523733328},
    "wrong": [["truncated", "sum", -0.2938933325],
              ["truncated and clamped", "sum", 0.0],
              ["top-1 renormalised is always 0", "sum", 0.0]],
  },
}

# Student and teacher logits of one row.
FORWARD_KL = {
  "KL-01": {
    "source": "keras-team/keras-io#869, IntelLabs/distiller#122",
    "student": [[1.0, 0.0, -1.0]],
    "teacher": [[0.0, 2.0, 0.0]],
    "weights": [1.0],
    "T": 2.0,
    "expect": {"sum": 0.8197673659,
               "denom": 1.0,
               "mean": 0.8197673659,
               "grad_mean": [[0.5890776669, -0.5378419981, -0.05123566878]]},
    "wrong": [["no T^2", "mean", 0.2049418415],
              ["T instead of T^2", "mean", 0.409883683]],
  },
  "KL-02": {
    "source": "huggingface/trl#4105, modelscope/easydistill#16",
    "student": [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]],
    "teacher": [[0.0, 2.0, 0.0], [1.0, -1.0, 0.0]],
    "weights": [1.0, 1.0],
    "expect": {"sum": 1.008249989,
               "denom": 2.0,
               "mean": 0.5041249947,
               "grad_mean": [[0.2793669884, -0.2711287856, -0.008238202874],
                             [-0.1659538112, 0.1216513801, 0.04430243114]]},
    "wrong": [["mean over tokens and vocab", "mean", 0.1680416649],
              ["divided by the count twice", "mean", 0.2520624973],
              ["divided by batch size 1", "mean", 1.008249989]],
  },
  "KL-03": {
    "source": "paiml/aprender#2153, pytorch/pytorch#57459",
    "student": [[2.0, 0.0, 0.0]],
    "teacher": [[0.0, 1.0, -1.0]],
    "weights": [1.0],
    "expect": {"sum": 0.9176922423,
               "denom": 1.0,
               "mean": 0.9176922423,
               "grad_mean": [[0.5422575711, -0.5587339769, 0.01647640575]]},
    "wrong": [["KL(student||teacher)", "mean", 0.7420332825],
              ["student never used: KL(teacher||teacher)", "mean", 0.0],
              ["softmax where log-softmax belongs", "mean", -1.105435161]],
  },
  "KL-04": {
    "source": "jxiw/MambaInLlama#11, NovaSky-AI/SkyRL#462",
    "student": [[1.0, 0.0], [0.0, 3.0], [2.0, 1.0], [0.0, 0.0]],
    "teacher": [[0.0, 1.0], [3.0, 0.0], [1.0, 1.0], [5.0, 0.0]],
    "weights": [1.0, 0.0, 1.0, 0.0],
    "expect": {"sum": 0.5822316642,
               "denom": 2.0,
               "mean": 0.2911158321,
               "grad_mean": [[0.2310585786, -0.2310585786], [0.0, 0.0],
                             [0.1155292893, -0.1155292893], [0.0, 0.0]]},
    "wrong": [["padding in both", "mean", 0.9876610007],
              ["padding in denominator", "mean", 0.1455579161]],
  },
  "KL-04b": {
    "source": "jxiw/MambaInLlama#11, NovaSky-AI/SkyRL#462",
    "student": [[-0.86, 2.63, 1.47], [0.76, 1.61, -2.35], [0.94, 2.15, 2.08],
                [-2.34, -1.34, 0.68], [0.49, -1.13, 1.86]],
    "teacher": [[0.64, -0.86, 3.98], [-2.41, 0.99, -0.22],
                [-0.53, 1.6, -2.73], [-1.48, -0.17, 2.61],
                [0.13, 1.34, -2.79]],
    "weights": [0.0, 0.0, 0.5, 0.25, 0.0],
    "expect": {"sum": 0.273723891,
               "denom": 0.75,
               "mean": 0.364965188,
               "grad_mean": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0],
                             [0.01913721664, -0.2900511916, 0.270913975],
                             [0.008596374112, 0.01825771046, -0.02685408457],
                             [0.0, 0.0, 0.0]]},
    "wrong": [["padding in both", "mean", 0.9568234788],
              ["padding in denominator", "mean", 0.0547447782],
              ["clamped denominator", "mean", 0.273723891]],
  },
  "KL-05": {
    "source": "google-deepmind/optax#1786",
    "student": [[-inf, 1.0, 3.0]],
    "teacher": [[-inf, 0.0, 1.0]],
    "weights": [1.0],
    "expect": {"sum": 0.08260774489,
               "denom": 1.0,
               "mean": 0.08260774489,
               "grad_mean": [[0.0, -0.1497384993, 0.1497384993]]},
    "wrong": [["0 times inf", "mean", nan]],
  },
  "KL-06": {
    "source": "huggingface/trl#5594, modelscope/ms-swift#9767",
    "student": [[1.0, 0.0], [0.0, 0.0]],
    "teacher": [[0.0, 1.0], [-inf, -inf]],
    "weights": [1.0, 0.0],
    "expect": {"sum": 0.4621171573,
               "denom": 1.0,
               "mean": 0.4621171573,
               "grad_mean": [[0.4621171573, -0.4621171573], [0.0, 0.0]]},
    "wrong": [["masked after the divergence", "mean", nan]],
  },
  "KL-07": {
    "source": "verl-project/verl#7855",
    "student": [[-inf, 0.0, 0.0]],
    "teacher": [[0.0, 0.0, 0.0]],
    "weights": [1.0],
    "expect": {"sum": inf, "denom": 1.0, "mean": inf},
    "wrong": [["NaN", "mean", nan],
              ["entry dropped", "mean", -0.2703100721]],
  },
  "KL-08": {
    "source": "MakazhanAlpamys/Soup#719",
    "student": [[3.0, -2.0, 1.0]],
    "teacher": [[-1.0, 4.0, 0.0]],
    "weights": [1.0],
    "T": 0.05,
    "expect": {"sum": 0.25,
               "denom": 1.0,
               "mean": 0.25,
               "grad_mean": [[0.05, -0.05, 0.0]]},
    "wrong": [["NaN gradient", "grad_mean", [[nan, nan, nan]]]],
  },
  "KL-09": {
    "source": "microsoft/LMOps#331, meta-pytorch/torchtune#2119",
    "student": [[1.0, 0.0, 2.0, -1.0]],
    "teacher": [[0.0, 1.0, 1.0, 0.0, 3.0, -2.0]],
    "weights": [1.0],
    "reject": "vocab-mismatch",
    "never": [["zero-padded student", 1.449847777]],
    "on_request": {"mean_if_truncated_on_request": 0.4337808305},
  },
  "KL-11": {
    "source": "huggingface/trl#5990",
    "student": [[2.0, 0.0, -1.0]],
    "teacher": [[0.0, 1.0, 1.0]],
    "weights": [1.0],
    "expect": {"sum": 1.264082803,
               "denom": 1.0,
               "mean": 1.264082803,
               "grad_mean": [[0.688432331, -0.3081235989, -0.3803087321]]},
    "wrong": [["entries clipped at 0.05", "mean", -0.1628963022]],
  },
  "KL-12": {
    "source": "modelscope/ms-swift#10156",
    "student": [[1.5, 0.25, -2.0, 3.0]],
    "teacher": [[1.5, 0.25, -2.0, 3.0]],
    "weights": [1.0],
    "teacher_dtype": "bfloat16",
    "student_dtype": "float32",
    "expect": {"sum": 0.0,
               "denom": 1.0,
               "mean": 0.0,
               "grad_mean": [[0.0, 0.0, 0.0, 0.0]]},
    "wrong": [["teacher softmax kept in bf16", "mean", 0.0001938713411]],
    "tolerance": 1e-06,
  },
  "KL-13": {
    "source": "huggingface/trl#6006",
    "student": [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]],
    "teacher": [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]],
    "weights": [1.0, 1.0, 1.0, 1.0],
    "reject": "length-mismatch",
    "never": [["trimmed over full count", 0.2540031237],
              ["silently trimmed", 0.3386708316]],
  },
}

# A soft and a hard term, with their coefficients.
OPD = {
  "OPD-01": {
    "source": "google/tunix#1747, IntelLabs/distiller#122",
    "student": [[1.0, 0.0, -1.0], [0.5, 0.5, 0.0]],
    "teacher": [[0.0, 2.0, 0.0], [1.0, 0.0, 1.0]],
    "labels": [1, 2],
    "weights": [1.0, 0.5],
    "soft": 0.5,
    "hard": 0.5,
    "T": 2.0,
    "expect": {"sum": 1.521755725,
               "denom": 1.5,
               "mean": 1.014503817,
               "soft_sum": 0.9068954413,
               "hard_sum": 2.136616008,
               "grad_mean": [[0.4181062076, -0.4310378423, 0.0129316348],
                             [0.05601386724, 0.1063322651, -0.1623461323]]},
    "wrong": [["no T^2", "mean", 0.7877799562],
              ["T^2 on both", "mean", 3.151119825],
              ["CE on tempered logits", "mean", 0.9077249476],
              ["each over token count", "mean", 0.7608778624]],
  },
  "OPD-02": {
    "source": "huggingface/trl#5731",
    "student": [[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]],
    "teacher": [[0.0, 2.0, 0.0], [1.0, 1.0, 0.0]],
    "labels": [0, 2],
    "weights": [1.0, 1.0],
    "soft": 1.0,
    "hard": 0.0,
    "T": 1.0,
    "expect": {"sum": 1.132282039,
               "denom": 2.0,
               "mean": 0.5661410197,
               "soft_sum": 1.132282039,
               "hard_sum": 0.0,
               "grad_mean": [[0.2793669884, -0.2711287856, -0.008238202874],
                             [-0.1661441125, 0.1214610788, 0.04468303378]]},
    "wrong": [["0.5/0.5 at T=1", "mean", 0.7368734921],
              ["pure KL at T=0.9", "mean", 0.548185632],
              ["0.5/0.5 at T=0.9", "mean", 0.7278957982]],
  },
  "OPD-03": {
    "source": "google/tunix#1745",
    "student": [[1.0, 0.0], [0.0, 1.0]],
    "teacher": [[0.0, 1.0], [1.0, 1.0]],
    "labels": [-1, 7],
    "weights": [1.0, 1.0],
    "soft": 1.0,
    "hard": 0.0,
    "T": 1.0,
    "expect": {"sum": 0.5822316642,
               "denom": 2.0,
               "mean": 0.2911158321,
               "soft_sum": 0.5822316642,
               "hard_sum": 0.0,
               "grad_mean": [[0.2310585786, -0.2310585786],
                             [-0.1155292893, 0.1155292893]]},
    "wrong": [["0 times NaN", "mean", nan]],
  },
  "OPD-04": {
    "source": "verl-project/verl-recipe#151",
    "student": [[1.0, 0.0]],
    "teacher": [[0.0, 1.0]],
    "labels": [0],
    "weights": [1.0],
    "soft": 0.0,
    "hard": 0.0,
    "T": 1.0,
    "reject": "mix-weights",
    "never": [["zero loss", 0.0]],
  },
}

# Micro-batches of one optimizer step; `theta` is added to all logits.
ACCUMULATED = {
  "ACC-01": {
    "source": "huggingface/transformers#34191, huggingface/blog#2414",
    "micro": [{"logits": [[0.0, 0.0]], "labels": [0], "weights": [1.0]},
              {"logits": [[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
               "labels": [0, 0, 1],
               "weights": [1.0, 1.0, 1.0]}],
    "expect": {"sum": 2.82648406,
               "denom": 4.0,
               "mean": 0.7066210149,
               "grad_theta": [-0.2125653752, 0.2125653752]},
    "wrong": [["mean of means", "mean", 0.7021297368],
              ["mean of means", "grad_theta", [-0.3083769168, 0.3083769168]],
              ["sum of means", "mean", 1.404259474]],
  },
  "ACC-02": {
    "source": "huggingface/transformers#34242, allenai/OLMo-core#657",
    "micro": [{"logits": [[1.0, 0.0], [0.0, 0.0]],
               "labels": [1, 0],
               "weights": [1.0, 0.0]},
              {"logits": [[3.0, 0.0], [0.0, 2.0]],
               "labels": [0, 1],
               "weights": [1.0, 1.0]},
              {"logits": [[0.0, 1.0], [1.0, 0.0]],
               "labels": [1, 0],
               "weights": [1.0, 1.0]},
              {"logits": [[0.0, 4.0], [1.0, 1.0]],
               "labels": [0, 1],
               "weights": [0.0, 1.0]}],
    "expect": {"sum": 2.808447606,
               "denom": 6.0,
               "mean": 0.468074601,
               "grad_theta": [0.2171392712, -0.2171392712]},
    "wrong": [["pmean of means", "mean", 0.6018570592],
              ["pmean of means", "grad_theta",
               [0.3167367758, -0.3167367758]]],
  },
  "ACC-06": {
    "source": "AI-Hypercomputer/maxtext#3040",
    "micro": [{"logits": [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]],
               "labels": [0, 1, 1],
               "weights": [1.0, 1.0, 1.0]},
              {"logits": [[0.0, 2.0], [0.0, 2.0]],
               "labels": [1, 0],
               "weights": [1.0, 1.0]}],
    "expect": {"sum": 5.193641085,
               "denom": 5.0,
               "mean": 1.038728217,
               "grad_theta": [0.08631631599, -0.08631631599]},
    "wrong": [["mean of unreduced sums", "mean", 2.596820542]],
  },
  "ACC-07": {
    "source": "google/tunix#1744, modelscope/mcore-bridge#104",
    "micro": [{"logits": [[0.0, 1.0], [2.0, 0.0]],
               "labels": [0, 0],
               "weights": [1.0, 1.0]},
              {"logits": [[nan, 0.0]], "labels": [-100], "weights": [0.0]}],
    "expect": {"sum": 1.440189699,
               "denom": 2.0,
               "mean": 0.7200948493,
               "grad_theta": [-0.4251307503, 0.4251307503]},
    "wrong": [["counted as a zero-loss batch", "mean", 0.3600474246],
              ["NaN times 0", "mean", nan]],
  },
  "OPD-05": {
    "source": "huggingface/trl#6006, modelscope/ms-swift#10165",
    "micro": [{"student": [[1.0, 0.0]],
               "teacher": [[0.0, 1.0]],
               "labels": [0],
               "weights": [1.0]},
              {"student": [[0.0, 2.0], [1.0, 1.0], [0.0, 0.0]],
               "teacher": [[0.0, 1.0], [2.0, 0.0], [1.0, 0.0]],
               "labels": [1, 0, 0],
               "weights": [1.0, 1.0, 0.5]}],
    "soft": 0.5,
    "hard": 0.5,
    "T": 2.0,
    "expect": {"sum": 1.292971978,
               "denom": 3.5,
               "mean": 0.3694205651,
               "grad_theta": [-0.173096594, 0.173096594]},
    "wrong": [["mean of means", "mean", 0.3790592474],
              ["mean of means", "grad_theta",
               [-0.08803323027, 0.08803323027]]],
  },
}

# Sums and denominators of micro-batches; the first `window` make a step.
WINDOWS = {
  "ACC-05": {
    "source": "huggingface/trl#6024",
    "sum": [5.0, 3.0, 4.0, 8.0],
    "denom": [10.0, 10.0, 12.0, 8.0],
    "window": 2,
    "expect": {"mean": 0.4, "denom": 20.0},
    "wrong": [["denominator of the generation window", "mean", 0.2]],
  },
  "ACC-05b": {
    "source": "huggingface/trl#6024",
    "sum": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "denom": [2.0, 9.0, 1.0, 4.0, 4.0, 4.0],
    "window": 4,
    "expect": {"mean": 0.625, "denom": 16.0},
    "wrong": [["denominator of six steps", "mean", 0.4166666667],
              ["denominator of first two", "mean", 0.9090909091]],
  },
  "ACC-08": {
    "source": "huggingface/transformers#39659, ml-explore/mlx-lm#1413",
    "sum": [6.0, 2.0, 4.0],
    "denom": [3.0, 2.0, 5.0],
    "window": 3,
    "expect": {"mean": 1.2, "denom": 10.0},
    "wrong": [["divided by configured 4 steps", "mean", 0.95]],
  },
  "ACC-13": {
    "source": "AI-Hypercomputer/maxtext#5060",
    "sum": [3.0],
    "denom": [3.0],
    "window": 1,
    "expect": {"mean": 1.0, "denom": 3.0},
    "wrong": [["reciprocal rounded to bf16", "mean", 1.001953125]],
    "tolerance": 1e-06,
  },
}

# A sum over a count, and a second term that is a mean a micro-batch.
TWO_TERMS = {
  "ACC-04": {
    "source": "huggingface/transformers#48706",
    "sum": [4.0, 1.0, 7.0],
    "denom": [4.0, 2.0, 2.0],
    "aux_mean": [0.3, 0.5, 0.1],
    "coef": 0.1,
    "expect": {"main": 1.5, "aux": 0.3, "total": 1.53},
    "wrong": [["aux times micro-batches", "total", 1.59],
              ["aux divided by token count too", "total", 1.51125]],
  },
}

# Shards over data-parallel devices, each held by several replicas.
MESH = {
  "ACC-03": {
    "source": "huggingface/transformers#39648, jax-ml/jax#3970",
    "shard_sum": [3.0, 5.0],
    "shard_count": [2, 3],
    "replicas": 2,
    "expect": {"sum": 8.0, "denom": 5, "mean": 1.6, "devices": 4},
    "wrong": [["numerator also summed over replicas", "mean", 3.2],
              ["scaled by all devices", "mean", 6.4]],
  },
}

# Gradients of unreduced sums, clipped to a global norm.
CLIP = {
  "ACC-09": {
    "source": "huggingface/transformers#986, facebookresearch/lingua#59",
    "grad_sum": [[6.0, 8.0], [0.0, 20.0]],
    "denom": [2.0, 8.0],
    "max_norm": 1.0,
    "expect": {"norm": 2.863564213,
               "clipped": [0.2095290887, 0.9778024141],
               "clipped_norm": 1.0,
               "first": 0.2095290887},
    "wrong": [["clipped per micro-batch", "clipped", [0.3, 0.9]],
              ["clipped before dividing", "clipped",
               [0.02095290887, 0.09778024141]]],
  },
}

# Evaluation batches.
METRICS = {
  "ACC-11": {
    "source": "huggingface/transformers#41898, google/tunix#1850",
    "sum": [10.0, 1.0, 2.0],
    "count": [4, 1, 8],
    "expect": {"loss": 1.0, "perplexity": 2.718281828, "count": 13.0},
    "wrong": [["mean of batch means", "loss", 1.25],
              ["perplexity of that", "perplexity", 3.490342957],
              ["mean of perplexities", "perplexity", 5.394933735]],
  },
}

# Values of rows of length 1 and their mask.
SELECTED = {
  "ACC-12": {
    "source": "huggingface/trl#7059",
    "value": [-1.0, -2.0, -4.0],
    "mask": [1.0, 0.0, 1.0],
    "expect": {"sum": -5.0, "count": 2.0, "mean": -2.5},
    "wrong": [["(B,) times (B,1)", "sum", -14.0]],
  },
  "ACC-12b": {
    "source": "huggingface/trl#7059",
    "value": [0.5, 2.0, -3.0, 8.0],
    "mask": [0.0, 1.0, 1.0, 0.0],
    "expect": {"sum": -1.0, "count": 2.0, "mean": -0.5},
    "wrong": [["(B,) times (B,1)", "sum", 15.0]],
  },
}

# A count and a number of single increments.
COUNTERS = {
  "CNT-02": {
    "source": "tensorflow/tensorboard#5337",
    "start": 16777216,
    "add_one": 5,
    "expect": {"count": 16777221},
    "wrong": [["float32 increments", "count", 16777216]],
  },
  "CNT-03": {
    "source": "karpathy/llm.c#822, microsoft/CNTK#2082",
    "start": 2147483647,
    "add_one": 10,
    "expect": {"count": 2147483657},
    "wrong": [["int32 wrap", "count", -2147483639]],
  },
  "CNT-03b": {
    "source": "karpathy/llm.c#822, microsoft/CNTK#2082",
    "start": 5368709120,
    "add_one": 3,
    "expect": {"count": 5368709123},
    "wrong": [["int32 wrap", "count", 1073741827]],
  },
}

# Equal token losses.
LARGE_SUM = {
  "CNT-01": {
    "source": "numpy/numpy#8133, huggingface/trl#878",
    "n": 2000,
    "value": 40.0,
    "expect": {"sum": 80000.0, "denom": 2000.0, "mean": 40.0},
    "wrong": [["float16 sum", "sum", inf],
              ["bf16 running sum", "sum", 16384.0]],
  },
}

# A table of logits of more than 2**31 entries.
FLAT_INDEX = {
  "CNT-04": {
    "source": "pytorch/pytorch#111484, PaddlePaddle/Paddle#30590",
    "rows": 16384,
    "vocab": 151936,
    "row": 16383,
    "col": 7,
    "expect": {"elements": 2489319424, "index": 2489167495},
    "wrong": [["int32 index", "index", -1805799801],
              ["int32 size", "elements", -1805647872]],
  },
}

# One row that can be read with and without a shift.
ALIGNED = {
  "POS-01": {
    "source": "google/tunix#1891, OpenRLHF/OpenRLHF#465",
    "logits": [[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.5, 0.0, 3.0],
               [0.0, 0.0, 1.0]],
    "tokens": [1, 2, 0, 1],
    "weights": [1.0, 1.0, 1.0, 1.0],
    "expect": {"same_position": 1.974152101,
               "same_denom": 4.0,
               "next_token": 2.615054564,
               "next_denom": 3.0},
    "wrong": [["shifted although same-position", "same_position",
               2.615054564],
              ["not shifted although next-token", "next_token",
               1.974152101]],
  },
}

# A masked-diffusion row.
MASKED = {
  "POS-05": {
    "source": "NVIDIA-NeMo/Automodel#1672, inclusionAI/dFactory#17",
    "token_ce": [[1.0, 2.0, 0.5, 3.0]],
    "masked": [[1, 0, 1, 0]],
    "supervised": [[1, 1, 1, 1]],
    "p_mask": [0.4],
    "expect": {"sum": 3.75, "denom": 4.0, "mean": 0.9375},
    "wrong": [["divided by masked count", "mean", 1.875],
              ["divided by sum of 1/p", "mean", 0.75]],
  },
  "POS-06": {
    "source": "huggingface/transformers#16711, "
              "jaywonchung/BERT4Rec-VAE-Pytorch#22",
    "token_ce": [[1.0, 2.0, 0.5]],
    "masked": [[0, 0, 0]],
    "supervised": [[1, 1, 1]],
    "p_mask": [0.15],
    "expect": {"sum": 0.0, "denom": 3.0, "mean": 0.0},
    "wrong": [["mean of nothing", "mean", nan]],
  },
}

# A trainer's state and configuration.
ALIASED = {
  "ST-01": {
    "source": "jax-ml/jax#9635, liesel-devs/liesel#272",
    "leaves": [["params/w", 1], ["params/b", 2], ["ema/w", 1], ["ema/b", 3]],
    "expect": {"duplicates": [["params/w", "ema/w"]]},
    "wrong": [["not detected", "duplicates", []]],
  },
}

DTYPES = {
  "ST-02": {
    "source": "google/tunix#1880, google-deepmind/optax#377, "
              "google-deepmind/optax#1038, google-deepmind/ferminet#105",
    "before": {"mu": "bfloat16", "count": "int32"},
    "after": {"mu": "float32", "count": "int32"},
    "expect": {"changed": ["mu"]},
    "wrong": [["promotion accepted", "changed", []]],
  },
}

RESUMED = {
  "ST-03": {
    "source": "google/orbax#2972, google/tunix#1747, "
              "AI-Hypercomputer/maxtext#4269",
    "saved": {"temperature": 2.0, "soft_loss_weight": 1.0,
              "hard_loss_weight": 0.0},
    "now": {"temperature": 1.0, "soft_loss_weight": 1.0,
            "hard_loss_weight": 0.0},
    "may_change": {"eval_every_n_steps": 7},
    "expect": {"differs": ["hyper_parameters.temperature"]},
    "wrong": [["accepted silently", "differs", []]],
  },
}

LOGGED = {
  "ST-04": {
    "source": "NVIDIA-NeMo/Automodel#1871, marin-community/levanter#1185, "
              "google/tunix#2041, netket/netket#2244",
    "shape": {"loss": [], "per_token": [2, 3], "kl": []},
    "expect": {"loggable": ["kl", "loss"], "not_loggable": ["per_token"]},
    "wrong": [["dropped without notice", "not_loggable", []]],
  },
}

OPTIONS = {
  "ST-05": {
    "source": "kohya-ss/sd-scripts#1980, kohya-ss/sd-scripts#1962, "
              "Nerogar/OneTrainer#1123, huggingface/trl#7063",
    "option": "min_snr",
    "reject": "unsupported",
  },
  "ST-05b": {
    "source": "kohya-ss/sd-scripts#1980, Nerogar/OneTrainer#1123",
    "option": "masked",
    "expect": {"denominator": 2.0},
    "wrong": [["accepted without effect", "denominator", 5.0]],
  },
}

# Rows of several sequences.
PACKED = {
  "POS-02": {
    "source": "meta-pytorch/torchtune#2613, pytorch/torchtitan#4075, "
              "unslothai/unsloth#8959",
    "logits": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0],
               [1.0, 1.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]],
    "tokens": [1, 2, 2, 0, 1, 2],
    "segments": [1, 1, 1, 2, 2, 2],
    "expect": {"sum": 6.204428998,
               "denom": 4.0,
               "mean": 1.55110725,
               "target_weights": [1.0, 1.0, 0.0, 1.0, 1.0]},
    "wrong": [["crosses the boundary", "mean", 1.85987039],
              ["crosses the boundary", "denom", 5.0]],
  },
}

# Token losses of a packed row, and their means.
PACKED_MEANS = {
  "POS-03": {
    "source": "google/tunix#1662, linkedin/Liger-Kernel#329, "
              "CarperAI/trlx#452",
    "token_loss": [[1.0, 2.0, 3.0, 10.0]],
    "segments": [[1, 1, 1, 2]],
    "expect": {"seq_mean": 6.0,
               "n_sequences": 2,
               "token_mean": 4.0,
               "n_tokens": 4},
    "wrong": [["row taken as a sequence", "seq_mean", 4.0],
              ["row taken as a sequence", "n_sequences", 1]],
  },
}

# Rows whose padding has the id of a token.
PADDED = {
  "POS-04": {
    "source": "NVIDIA-NeMo/Automodel#1336, NVIDIA-NeMo/Megatron-Bridge#4660",
    "tokens": [[5, 6, 2, 2, 2]],
    "lengths": [3],
    "pad_id": 2,
    "expect": {"mask": [[1, 1, 1, 0, 0]], "count": 3},
    "wrong": [["mask by value", "mask", [[1, 1, 0, 0, 0]]],
              ["mask by value", "count", 2]],
  },
  "POS-04b": {
    "source": "NVIDIA-NeMo/Automodel#1336, NVIDIA-NeMo/Megatron-Bridge#4660",
    "tokens": [[5, 2, 6, 2, 2, 2], [2, 7, 8, 9, 4, 2]],
    "lengths": [4, 6],
    "pad_id": 2,
    "expect": {"mask": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], "count": 10},
    "wrong": [["mask by value", "count", 6],
              ["trailing run removed", "count", 8]],
  },
}
