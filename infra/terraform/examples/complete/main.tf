# Gateways in every zone, larger NATS servers, a way to model hubs, access logs, a pool that shrinks to nothing.

provider "aws" {
  region = var.region

  default_tags {
    tags = { "sllm:cluster" = var.name }
  }
}

locals {
  bucket_arn = module.model_store.bucket_arn
  urls       = { for kind, artifact in var.artifacts : kind => "s3://${var.bucket_name}/${artifact.key}" }
}

module "model_store" {
  source = "../../modules/model_store"

  bucket_name = var.bucket_name
  log_bucket  = var.log_bucket
}

module "network" {
  source = "../../modules/network"

  name        = var.name
  region      = var.region
  zones       = var.zones
  bucket_arns = [local.bucket_arn]
  nat         = "per_zone"
}

module "nats" {
  source = "../../modules/nats"

  name                = var.name
  region              = var.region
  vpc_id              = module.network.vpc_id
  subnets             = module.network.private_subnets
  security_group_ids  = [module.network.nats_security_group_id]
  instance_type       = "m7i.large"
  volume_gb           = 100
  parameter_prefix    = var.parameter_prefix
  artifact_bucket_arn = local.bucket_arn
  artifact_url        = local.urls.server
  artifact_sha256     = var.artifacts.server.sha256
  decrypt_key_arns    = [module.model_store.key_arn]
}

module "gpu_pool" {
  source = "../../modules/gpu_pool"

  name               = "${var.name}-gpu"
  region             = var.region
  subnet_ids         = module.network.private_subnet_ids
  security_group_ids = [module.network.node_security_group_id]
  instance_types     = ["g6.12xlarge", "g5.12xlarge"]
  max_size           = 16
  node_drain_s       = 600
  labels             = { tier = "standard" }
  model_bucket_arn   = local.bucket_arn
  decrypt_key_arns   = [module.model_store.key_arn]
  artifact_url       = local.urls.node
  artifact_sha256    = var.artifacts.node.sha256
  nats_url           = module.nats.url
  parameter_prefix   = var.parameter_prefix
}

module "gateway" {
  source = "../../modules/gateway"

  name                       = var.name
  region                     = var.region
  vpc_id                     = module.network.vpc_id
  public_subnet_ids          = module.network.public_subnet_ids
  private_subnet_ids         = module.network.private_subnet_ids
  balancer_security_group_id = module.network.balancer_security_group_id
  gateway_security_group_id  = module.network.gateway_security_group_id
  instance_type              = "m7i.large"
  size                       = 3
  drain_s                    = 300
  zone_id                    = var.zone_id
  log_bucket                 = var.log_bucket
  host                       = var.host
  certificate_arn            = var.certificate_arn
  nats_url                   = module.nats.url
  parameter_prefix           = var.parameter_prefix
  artifact_bucket_arn        = local.bucket_arn
  artifact_url               = local.urls.server
  artifact_sha256            = var.artifacts.server.sha256
  decrypt_key_arns           = [module.model_store.key_arn]
  settings                   = module.gpu_pool.controller_settings
  policy_arns                = { gpu = module.gpu_pool.scaler_policy_arn }
}
