# shellcheck shell=bash source-path=SCRIPTDIR
# What the recipes share; they source it first. It moves to the project's root, so relative paths count from there.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
NAME=$(basename "$0" .sh)
command -v torchrun >/dev/null || PATH=$PWD/.venv/bin:$PATH

# shellcheck source=environment.sh
source examples/_shared/environment.sh

# Stops the recipe with all that is wrong, a line each.
fail() {
    printf "$NAME.sh: %s\n" "$@" >&2
    exit 2
}

# Snt9b: Ascend 910B, 8 cards a node. Snt9b23: 910C, 16 dies a node, two on a card.
NODE_TYPE=${NODE_TYPE:-Snt9b}
[[ $NODE_TYPE == Snt9b || $NODE_TYPE == Snt9b23 ]] || fail "NODE_TYPE is $NODE_TYPE; it can be Snt9b or Snt9b23"

# defaults NAME=VALUE ...: for variables that are not set.
defaults() {
    local pair name
    for pair in "$@"; do
        name=${pair%%=*}
        [[ -n ${!name:-} ]] || printf -v "$name" %s "${pair#*=}"
    done
}

# preset TYPE NAME=VALUE ...: defaults on nodes of that type.
preset() {
    [[ $NODE_TYPE != "$1" ]] || defaults "${@:2}"
}

# tiny KIND NAME=VALUE ...: with TINY=1, defaults for two processes on this machine's CPU, with the quickstart's text
# and tokenizer. KIND is the model's family, whose tiny sizes replace the model's; or data.
# shellcheck disable=SC2034 # the recipes read it
TINY_ARGS=()
tiny() {
    [[ ${TINY:-0} == 1 ]] || return 0
    local folder=out/tiny/$NAME
    [[ -n ${CKPT_SAVE_DIR:-} || ${VALIDATE_ONLY:-0} == 1 ]] || rm -rf "$folder" # each run of its own
    defaults NPUS_PER_NODE=2 NNODES=1 SEQ_LENGTH=64 MBS=1 GBS=4 TRAIN_ITERS=4 CKPT_SAVE_DIR="$folder" \
        DATA_PATH=examples/quickstart/text/train.jsonl TOKENIZER_PATH=examples/quickstart/model \
        INPUT_PATH=examples/quickstart/text/valid.jsonl OUTPUT_PREFIX="$folder/corpus" WORKERS=1 \
        MASTER_PORT="$(python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')" "${@:2}"
    export MINDSPEED_LLM_DEVICE=${MINDSPEED_LLM_DEVICE:-cpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    [[ $1 != data ]] || return 0
    # shellcheck source=tiny_sizes.sh
    source examples/_shared/tiny_sizes.sh
    tiny_sizes "$1"
    TINY_ARGS+=(--data-cache-path out/tiny/data)
}

# tiny_convert FAMILY NAME=VALUE ...: with TINY=1, what is converted is a model of the family's tiny size with random
# weights, made at need; and back, the result of that.
tiny_convert() {
    [[ ${TINY:-0} == 1 ]] || return 0
    local there=out/tiny/${NAME%_*}_hf2mcore
    if [[ $NAME == *_hf2mcore ]]; then
        there=out/tiny/models/$1
        [[ -n ${LOAD_DIR:-} || -e $there ]] || python examples/_shared/tiny_model.py "$1" "$there"
    elif [[ -z ${LOAD_DIR:-} && ! -e $there ]]; then
        VALIDATE_ONLY=0 SAVE_DIR=$there bash examples/*/"${NAME%_*}_hf2mcore.sh"
    fi
    defaults LOAD_DIR="$there" SAVE_DIR="out/tiny/$NAME" "${@:2}"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

# require VARIABLE WHAT: remembers what is missing; require_all tells it.
MISSING=()
require() {
    [[ -n ${!1:-} ]] || MISSING+=("$1 is not set: $2")
}

# require_path VARIABLE WHAT: the same, and of several words each that is no number must be there, or be the prefix of
# prepared data.
require_path() {
    local word words
    require "$@"
    read -r -a words <<<"${!1}"
    for word in "${words[@]}"; do
        [[ -e $word || -e $word.idx || $word =~ ^[0-9.]+$ ]] ||
            MISSING+=("$1: there is no $word (in $PWD): set $1 to $2")
    done
}

require_all() {
    ((${#MISSING[@]} == 0)) || fail "${MISSING[@]}"
    command -v torchrun >/dev/null || fail "there is no torchrun: 'make build', or activate where the package is installed"
}

# check_pretrain FLAGS: the paths; then, with VALIDATE_ONLY=1 or --validate-only, the flags for all processes of the run,
# and the recipe ends here.
check_pretrain() {
    require_path DATA_PATH "raw text, or the prefix of prepared data"
    require_path TOKENIZER_PATH "the Hugging Face folder of the tokenizer"
    require CKPT_SAVE_DIR "a folder for checkpoints, the same for all nodes"
    [[ -z $CKPT_LOAD_DIR ]] || require_path CKPT_LOAD_DIR "a Hugging Face folder or a folder of checkpoints, or leave it empty"
    require_all
    validate pretrain_gpt.py "$@"
}

# check_data FLAGS: the same for preparing data.
check_data() {
    require_path INPUT_PATH "files or folders with text"
    require_path TOKENIZER_PATH "the Hugging Face folder of the tokenizer"
    require_all
    validate preprocess_data.py "$@"
}

# check_convert FLAGS: the same for converting weights, where VALIDATE_ONLY=1 is --dry-run: the plan is proved and shown.
check_convert() {
    require_path LOAD_DIR "the folder to convert"
    require SAVE_DIR "a folder for the result"
    require_all
    [[ ${VALIDATE_ONLY:-0} != 1 ]] || exec python convert_ckpt.py "$@" --dry-run
}

# validate SCRIPT FLAGS: see check_pretrain.
validate() {
    [[ ${VALIDATE_ONLY:-0} == 1 || " $* " == *" --validate-only "* ]] || return 0
    WORLD_SIZE=$((${NPUS_PER_NODE:-1} * ${NNODES:-1})) exec python "$@" --validate-only
}
