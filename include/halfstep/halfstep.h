// All of Halfstep.
#pragma once

#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/checkpoint.h>
#include <halfstep/config.h>
#include <halfstep/data.h>
#include <halfstep/error.h>
#include <halfstep/formats.h>
#include <halfstep/grads.h>
#include <halfstep/machine.h>
#include <halfstep/memory.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/models.h>
#include <halfstep/op_policy.h>
#include <halfstep/optim.h>
#include <halfstep/params.h>
#include <halfstep/precision.h>
#include <halfstep/safetensors.h>
#include <halfstep/scaling.h>
#include <halfstep/schedule.h>
#include <halfstep/state_dict.h>
#include <halfstep/step_report.h>
#include <halfstep/storage.h>
#include <halfstep/tensor_file.h>
#include <halfstep/token_file.h>
#include <halfstep/tokenizer.h>
